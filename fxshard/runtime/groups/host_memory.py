"""What a program frees on the CPU stays with its process: a step takes again what the step before it freed.

glibc hands freed memory back to the system where it lies at the end of its heap and is more than a threshold, at most 64 MiB by itself;
the next step gets new pages for it, each of which costs a fault, microseconds in a virtual machine. Decision 0034.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's options (mallopt(3))."""
LARGEST = 32 << 20
"""Bytes: what is larger glibc maps by itself, and hands back, whatever it is told."""
LEAST = 2 * LARGEST
"""Bytes: as far as glibc's thresholds go by themselves, which they do no longer once they are set."""
_kept = 0


def keep(size: int) -> bool:
    """Has glibc keep ``size`` freed bytes, at least LEAST and what earlier calls named; whether it does. Not on other systems."""
    global _kept
    size = max(size, LEAST)
    if sys.platform != "linux" or size <= _kept or _is_set():
        return _kept > 0
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if set_option is None or not set_option(MMAP_THRESHOLD, LARGEST) or not set_option(TRIM_THRESHOLD, min(size, 2**31 - 1)):
        return False
    _kept = size
    return True


def _is_set() -> bool:
    """Whether somebody chose glibc's options for this process."""
    return any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP")) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
