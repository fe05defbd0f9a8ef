"""Which reductions exist for a dtype, and which commute with a dtype conversion: op(convert(x_1), ...) = convert(op(x_1, ...)).

Integers wrap around, so the parts of a pending sum are any numbers with that sum modulo 2^bits: in int8, 100 + 100 is -56, but
200 if the parts are widened first. Rounding is accepted: a sum of narrower floats is still a sum within their precision.
"""

from __future__ import annotations

import math

import torch

from fxshard.layout.layouts import EXPERTS


def has_reduction(op: str, dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` can be reduced by ``op``: booleans have no sum or product, integers no average, complex numbers no
    maximum or minimum, and no product, which collectives lack, 8-bit floats no reduction at all. Rows of experts may have any dtype."""
    if op == EXPERTS:
        return True
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return False
    if op in ("max", "min"):
        return not dtype.is_complex
    if op == "product" and dtype.is_complex:
        return False
    return is_inexact(dtype) or (op != "avg" and dtype != torch.bool)


def identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity element of a reduction."""
    if op in ("sum", "avg", EXPERTS):
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max


def commutes_with_conversion(op: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the pending reduction ``op`` commutes with a conversion from ``source`` to ``target``."""
    if not (has_reduction(op, source) and has_reduction(op, target)):
        return False
    if source == target or op == EXPERTS:
        return True
    if op in ("max", "min"):
        return _keeps_order(source, target)
    if is_inexact(source) or is_inexact(target):
        return op in ("sum", "avg") and is_inexact(source) and is_inexact(target)
    return target.itemsize <= source.itemsize


def is_inexact(dtype: torch.dtype) -> bool:
    """Floating-point or complex. A conversion from complex to real drops the imaginary parts, which commutes with sums."""
    return dtype.is_floating_point or dtype.is_complex


def _keeps_order(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the conversion is monotone: to floats always, to integers only from integers whose range fits, so that nothing wraps."""
    if is_inexact(source) or is_inexact(target):
        return is_inexact(target)
    low, high = _range(source)
    least, most = _range(target)
    return least <= low and high <= most


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)
