"""Loops over arrays as machine code (numba), compiled at the first call and kept on disk beside the source.

Where neither there nor in the user's cache directory can be written, every process compiles anew, and says so. What is
kept is keyed by the file of the loop: after a change of the options here, remove `__pycache__`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"nnan", "nsz"}}
log = logging.getLogger(__name__)


def compiled(kernel: Kernel) -> Kernel:
    """The same function, compiled; divisions behave as numpy's. Numbers may be `inf` but not `nan`, so that minima vectorise."""
    try:
        return cast(Kernel, numba.njit(cache=True, **OPTIONS)(kernel))
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        log.warning("the solver's loops are compiled in every process (10 to 30 seconds): %s; set NUMBA_CACHE_DIR", error)
        return cast(Kernel, numba.njit(**OPTIONS)(kernel))
