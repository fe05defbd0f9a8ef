"""Formulas for values that depend on nothing but positions: sums of indices, and one of two numbers by conditions on such sums.

A formula says of each element what the tensor holds, as its dtype holds it. What might round or wrap around has no formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxshard._torch_compat.sizes.symbols import magnitude, surely

Whole = Any
"""An int, perhaps a symbolic one."""
Number = bool | int | float
LARGEST_SIZE = 1 << 40
"""Of a symbolic dim: sums of positions of int64 cannot wrap around then."""


@dataclass(frozen=True)
class Affine:
    """The whole number ``start + sum_d steps[d] * i_d`` at position i. ``steps``: one for each dim, 0 where the size is 1."""

    start: Whole
    steps: tuple[int, ...]

    def over(self, dims: int) -> Affine:
        """The same value broadcast to ``dims`` dims."""
        return replace(self, steps=(0,) * (dims - len(self.steps)) + self.steps)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """``self + times * other``, which has as many dims."""
        steps = tuple(a + times * b for a, b in zip(self.steps, other.steps, strict=True))
        return Affine(self.start + times * other.start, steps)

    def least(self, shape: Sequence[Whole]) -> Whole:
        """The least value over all positions of ``shape``."""
        return self.start + sum(step * (size - 1) for step, size in zip(self.steps, shape, strict=True) if step < 0)


@dataclass(frozen=True)
class Where:
    """``yes`` at the positions where all of ``reached`` are at least 0, else ``no``; without conditions, ``yes`` everywhere.

    The numbers are of the kind of the value's dtype, bool, int or float, and exactly what the tensor holds.
    """

    reached: tuple[Affine, ...]
    yes: Number
    no: Number

    def over(self, dims: int) -> Where:
        """The same value broadcast to ``dims`` dims."""
        return replace(self, reached=tuple(one.over(dims) for one in self.reached))


Known = Affine | Where


def opposite(value: Where) -> Where | None:
    """The same value with ``yes`` and ``no`` exchanged; None unless there is one condition."""
    if len(value.reached) != 1:
        return None
    one = value.reached[0]
    return Where((Affine(-1 - one.start, tuple(-step for step in one.steps)),), value.no, value.yes)


def settled(value: Known, result: torch.Tensor) -> Known | None:
    """``value`` as a tensor like ``result`` holds it, without conditions that always hold; None where that is not certain."""
    if isinstance(value, Affine):
        value = _without_ones(value, result.shape)
        return value if _fits(value, result) else None
    unsettled = [_without_ones(one, result.shape) for one in value.reached if not surely(one.least(result.shape) >= 0)]
    if any(surely(_most(one, result.shape) < 0) for one in unsettled):
        value, unsettled = Where((), value.no, value.no), []
    yes, no = as_held(value.yes, result.dtype), as_held(value.no, result.dtype)
    if yes is None or no is None:
        return None
    reached = () if yes == no else tuple(one for i, one in enumerate(unsettled) if not _implied(i, unsettled))
    return Where(reached, yes, no if reached else yes)


def _most(value: Affine, shape: Sequence[Whole]) -> Whole:
    return value.start + sum(step * (size - 1) for step, size in zip(value.steps, shape, strict=True) if step > 0)


def _implied(place: int, conditions: Sequence[Affine]) -> bool:
    """Whether another condition, of equal ones the first, is at least as strict as the one at ``place``."""
    one = conditions[place]
    others = [
        (i, other) for i, other in enumerate(conditions) if i != place and other.steps == one.steps and surely(other.start <= one.start)
    ]
    return any(i < place or not surely(one.start <= other.start) for i, other in others)


def _without_ones(value: Affine, shape: Sequence[Whole]) -> Affine:
    return replace(value, steps=tuple(0 if surely(size == 1) else step for step, size in zip(value.steps, shape, strict=True)))


def _fits(value: Affine, result: torch.Tensor) -> bool:
    """Whether no element wraps around in the dtype of ``result``."""
    if not is_whole(result.dtype) or torch.iinfo(result.dtype).min == 0:
        return False
    sizes = [size if isinstance(size, int) else LARGEST_SIZE for size in result.shape]
    largest = magnitude(value.start, LARGEST_SIZE) + sum(abs(step) * size for step, size in zip(value.steps, sizes, strict=True))
    return largest <= torch.iinfo(result.dtype).max


def is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def as_held(number: Number, dtype: torch.dtype) -> Number | None:
    """What a tensor of ``dtype`` holds if it is filled with ``number``; None if that wraps around or is cut to a whole number."""
    if dtype == torch.bool:
        return bool(number)
    if is_whole(dtype):
        if isinstance(number, float) and not (math.isfinite(number) and number == int(number)):
            return None
        limits = torch.iinfo(dtype)
        return int(number) if limits.min <= number <= limits.max else None
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return None
    if not isinstance(number, float) and not -(2**63) <= number < 2**63:
        return None
    exact = torch.float64 if isinstance(number, float) else torch.int64
    return float(torch.tensor(number, dtype=exact, device="cpu").to(dtype).item())
