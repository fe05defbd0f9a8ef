"""Loops over arrays as machine code (numba), compiled at the first call and kept on disk beside the source.

Where neither there nor in the user's cache directory can be written, every process compiles anew, and says so. What is
kept is keyed by the file of the loop: after a change of the options here, remove `__pycache__`.

numba is imported at the first call too, which takes a quarter of a second: who reads a plan from the cache, or gets it from another rank,
never calls.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}}
log = logging.getLogger(__name__)


def compiled(kernel: Kernel) -> Kernel:
    """The same function, compiled; divisions behave as numpy's. Numbers may be `inf` but not `nan`, so that minima vectorise."""
    return cast(Kernel, _Loop(kernel))


class _Loop:
    """A loop that becomes machine code when it is first called."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        functools.update_wrapper(self, kernel)
        self.kernel, self.call = kernel, self._first

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _first(self, *args: Any) -> Any:
        return self.machine_code(*args)

    @functools.cached_property
    def machine_code(self) -> Any:
        """numba's own object; it looks up the loops that this one calls by their names, and must find its own there."""
        names = self.kernel.__globals__
        for name in self.kernel.__code__.co_names:
            if isinstance(loop := names.get(name), _Loop):
                names[name] = loop.machine_code
        self.call = _jit(self.kernel)
        return self.call

    def __getattr__(self, name: str) -> Any:
        """What numba's object has to tell, such as the ``signatures`` that it was compiled for."""
        if name.startswith("__") or name in ("kernel", "call", "machine_code"):
            raise AttributeError(name)
        return getattr(self.machine_code, name)


def _jit(kernel: Callable[..., Any]) -> Any:
    import numba

    try:
        return numba.njit(cache=True, **OPTIONS)(kernel)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        log.warning("the solver's loops are compiled in every process (10 to 30 seconds): %s; set NUMBA_CACHE_DIR", error)
        return numba.njit(**OPTIONS)(kernel)
