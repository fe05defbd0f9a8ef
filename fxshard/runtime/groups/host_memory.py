"""Makes glibc keep freed memory, so that each step reuses the pages of the step before.

By default glibc returns freed memory at the end of its heap to the system if it exceeds a threshold of at most 64 MiB. The next step then
takes new pages, and each costs a page fault, which takes microseconds in a virtual machine. Decision 0034.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's options (mallopt(3))."""
MMAP_BYTES = 32 << 20
"""Bytes above which glibc maps each block separately and always returns it; its maximum for this option."""
MIN_KEPT = 2 * MMAP_BYTES
"""Bytes up to which glibc raises its threshold automatically, until somebody sets it."""
_kept = 0


def keep_freed(size: int) -> bool:
    """Makes glibc keep ``size`` freed bytes, at least MIN_KEPT and the sizes of earlier calls; returns whether it does (only on Linux)."""
    global _kept
    size = max(size, MIN_KEPT)
    if sys.platform != "linux" or size <= _kept or _is_set():
        return _kept > 0
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is None or not set_option(MMAP_THRESHOLD, MMAP_BYTES) or not set_option(TRIM_THRESHOLD, min(size, 2**31 - 1)):
        return False
    _kept = size
    return True


def _is_set() -> bool:
    """Whether environment variables already set glibc's options for this process."""
    return any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
