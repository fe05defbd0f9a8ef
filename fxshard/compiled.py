"""Loops over arrays, compiled by numba at the first call and cached on disk beside the source.

If neither that folder nor the user's cache directory is writable, every process compiles again and logs a warning. The cache is keyed
by the source file of the loop: after a change of the options here, remove `__pycache__`.

numba is imported at the first call as well. The import takes a quarter of a second; a process that reads its plan from the plan cache or
from another rank never pays for it.
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
    """The function, compiled. Division by zero gives `inf` as in numpy. No number may be `nan`, so that minima vectorise."""
    return cast(Kernel, _Loop(kernel))


class _Loop:
    """A function that is compiled when it is first called."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        functools.update_wrapper(self, kernel)
        self.kernel, self.call = kernel, self._first

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _first(self, *args: Any) -> Any:
        return self.machine_code(*args)

    @functools.cached_property
    def machine_code(self) -> Any:
        """numba's dispatcher. numba looks up callees in the module's globals, so these are replaced by their dispatchers first."""
        names = self.kernel.__globals__
        for name in self.kernel.__code__.co_names:
            if isinstance(loop := names.get(name), _Loop):
                names[name] = loop.machine_code
        self.call = _jit(self.kernel)
        return self.call

    def __getattr__(self, name: str) -> Any:
        """Attributes of numba's dispatcher, such as ``signatures``."""
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
        log.warning("loops are compiled in every process (10 to 30 seconds): %s; set NUMBA_CACHE_DIR", error)
        return numba.njit(**OPTIONS)(kernel)
