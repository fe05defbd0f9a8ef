"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import math
import re
from typing import Any

from fxshard.errors import OptionError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def size_text(size: float) -> str:
    """Three digits and a unit, a power of 1000: ``4.45 GB``; below 1000 ``512 bytes``."""
    for unit in ("TB", "GB", "MB", "KB"):
        value = size / UNITS[unit]
        if abs(value) >= 0.9995:
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return "1 byte" if size == 1 else f"{size:.0f} bytes"


def exact_size(size: int) -> str:
    """``size_text`` with the exact number of bytes: ``4.45 GB (4,446,412,812 bytes)``."""
    return f"{size_text(size)} ({size:,} bytes)" if size >= UNITS["KB"] else size_text(size)


def beyond_device(peak: float, memory: float | None, hardware: str) -> str:
    """What to say of a ``peak`` that does not fit into a device's ``memory`` (both in bytes; None: unknown), with a limit that leaves a
    tenth of it to CUDA, NCCL and the allocator; "" if it fits."""
    if memory is None or peak <= memory:
        return ""
    return f'{hardware} has {size_text(memory)}; give a limit, such as memory_limit="{0.9 * memory / UNITS["GB"]:.3g}GB"'


def parse_size(text: str) -> int:
    """Bytes in ``8000000000``, ``8GB`` (a power of 1000) or ``8 GiB`` (of 1024); raises OptionError on anything else."""
    found, units = _SIZE.fullmatch(text), {unit.lower(): size for unit, size in UNITS.items()} | {"": 1}
    if found is None or found[2].lower() not in units:
        remedy = f"write digits and perhaps a unit ({', '.join(UNITS)}), for example 80GB"
        raise OptionError(f"cannot read {text[:60]!r} as a number of bytes", remedy=remedy)
    return int(float(found[1]) * units[found[2].lower()])


def read_size(value: Any, name: str) -> float:
    """The user's value of ``name``, a number of bytes or a string with a unit, as a number; raises OptionError."""
    if isinstance(value, str):
        try:
            return parse_size(value)
        except OptionError as error:
            raise OptionError(error.what, where=name, remedy=error.remedy) from error
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value == 0 or 1 <= value < math.inf):
        raise OptionError(f"cannot read {name}={value!r:.60}", where=name, remedy="give bytes, as a number or like '80GB' or '64GiB'")
    return value
