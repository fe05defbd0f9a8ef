"""Which reductions a dtype has, and which of them a conversion keeps: op(convert(x_1), ...) = convert(op(x_1, ...)).

Whole numbers wrap around, so the parts of a sum may be any numbers that add up to it modulo 2^bits: in [100, 100] of
int8 the sum is -56, and 200 once they are wider. Rounding is no harm: that of a narrower float keeps sums as floats do.
"""

from __future__ import annotations

import math

import torch


def has_reduction(op: str, dtype: torch.dtype) -> bool:
    """Booleans have no sum and no product, whole numbers no average, complex ones no order, floats of eight bits nothing."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return False
    if op in ("max", "min"):
        return not dtype.is_complex
    return is_real(dtype) or (op != "avg" and dtype != torch.bool)


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The number that leaves a reduction as it is."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def keeps(op: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the pending reduction ``op`` passes through a conversion from ``source`` to ``target``."""
    if not (has_reduction(op, source) and has_reduction(op, target)):
        return False
    if source == target:
        return True
    if op in ("max", "min"):
        return _keeps_order(source, target)
    if is_real(source) or is_real(target):
        return op in ("sum", "avg") and is_real(source) and is_real(target)
    return target.itemsize <= source.itemsize


def is_real(dtype: torch.dtype) -> bool:
    """Real or complex; from complex to real the imaginary parts are dropped, which keeps sums."""
    return dtype.is_floating_point or dtype.is_complex


def _keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    """To floats, and to whole numbers that hold all of the source's: no number wraps around, and there is no infinity to convert."""
    if is_real(source) or is_real(target):
        return is_real(target)
    low, high = _range(source)
    least, most = _range(target)
    return least <= low and high <= most


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)
