"""Loops over arrays as machine code (numba), compiled at the first call and kept on disk beside the source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(kernel: Kernel) -> Kernel:
    """The same function, compiled; divisions behave as numpy's. Numbers may be `inf` but not `nan`, so that minima vectorise."""
    return cast(Kernel, numba.njit(cache=True, error_model="numpy", fastmath={"nnan", "nsz"})(kernel))
