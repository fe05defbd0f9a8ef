"""A sample with the operator's outputs on whole tensors, the reference for all checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.oracle.pieces import close, non_contiguous, tolerance
from fxshard.strategies.oracle.samples import Sample, call_of_sample, filled, operator, run, variations

MIN_ELEMENTS = 6
"""Least number of elements of an operand; with fewer, a wrong combination may hold by accident."""
UNDEFINED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize", "resize_")
"""Operators that return uninitialised memory."""
RANDOM = "two runs differ: its result is random or undefined"


@dataclass(frozen=True)
class Case:
    """A sample and its ``values``: (operands, outputs) of each variation on which the operator runs."""

    sample: Sample
    call: Call
    values: tuple[tuple[list[torch.Tensor], tuple[Any, ...]], ...] = field(default=())

    @property
    def limit(self) -> float:
        return tolerance(self.sample.tensors)

    @property
    def inconclusive(self) -> str:
        """Why a wrong combination might go unnoticed; empty if it cannot. It cannot if operands are large enough and, in some variation,
        the elements of each operand differ, and so do those of each output. An output of one element must differ between variations."""
        read = [i for i in range(len(self.sample.tensors)) if i not in self.sample.outs]
        if not all(self.sample.tensors[i].numel() >= MIN_ELEMENTS for i in read):
            return f"an operand has fewer than {MIN_ELEMENTS} elements"
        telling = [outputs for tensors, outputs in self.values if all(_varies(tensors[i]) for i in read)]
        if not telling:
            return "the numbers of an operand are all alike"
        columns = zip(*([o for o in outputs if isinstance(o, torch.Tensor)] for outputs in telling), strict=True)
        tells = all(_varies(torch.stack(o)) if o[0].numel() == 1 else any(map(_varies, o)) for o in columns)
        return "" if tells else "the numbers of a result are all alike"

    @property
    def is_defined(self) -> bool:
        """Whether the operator returns finite numbers, and equal ones for other strides.

        Outside its domain, a kernel's vectorised loop and its remainder loop may differ.
        """
        tensors = [o for _, outputs in self.values for o in outputs if isinstance(o, torch.Tensor) and o.numel()]
        if tensors and not any(not is_inexact(o.dtype) or bool(o.isfinite().any()) for o in tensors):
            return False
        return all(self._is_steady(operands, whole) for operands, whole in self.values)

    def _is_steady(self, operands: list[torch.Tensor], whole: tuple[Any, ...]) -> bool:
        try:
            again = run(self.sample.op, *filled(self.sample, [non_contiguous(t) for t in operands]))
        except Exception:  # a kernel may reject such strides
            return True
        return all(_same(a, b) for a, b in zip(again, whole, strict=True))

    def infinite(self, output: int) -> int:
        """Number of positions of an output that are not finite in some variation."""
        tensors = [outputs[output] for _, outputs in self.values]
        if not tensors or not isinstance(tensors[0], torch.Tensor) or not is_inexact(tensors[0].dtype):
            return 0
        return int((~torch.stack([t.isfinite() for t in tensors])).any(0).sum())


def case_of(sample: Sample) -> Case | str:
    """The case of a sample, or the reason why it cannot be judged."""
    if sample.op.split(".")[1] in UNDEFINED:
        return "its numbers are undefined"
    try:
        outputs, again = (run(sample.op, *filled(sample, [t.clone() for t in sample.tensors])) for _ in range(2))
    except Exception as error:
        return f"the operator fails on it: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if _draws_few(sample.op, outputs) or not all(_same(a, b) for a, b in zip(outputs, again, strict=True)):
        return RANDOM
    call = call_of_sample(sample, outputs)
    return Case(sample, call, tuple(_values(sample, outputs)))


def _draws_few(op: str, outputs: tuple[Any, ...]) -> bool:
    """Whether the operator may draw random numbers, but so few that two runs may agree by chance."""
    drawn = torch.Tag.nondeterministic_seeded in operator(op).tags
    return drawn and any(isinstance(o, torch.Tensor) and 0 < o.numel() < MIN_ELEMENTS for o in outputs)


def _values(sample: Sample, outputs: tuple[Any, ...]) -> Iterator[tuple[list[torch.Tensor], tuple[Any, ...]]]:
    """(operands, outputs) of each variation, without those that fail or whose outputs have other shapes."""
    shapes = [getattr(o, "shape", None) for o in outputs]
    for tensors in variations(sample):
        try:
            whole = run(sample.op, *filled(sample, [t.clone() for t in tensors]))
        except Exception:
            continue
        if [getattr(o, "shape", None) for o in whole] == shapes:
            yield tensors, whole


def _same(a: Any, b: Any) -> bool:
    return close(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


def _varies(x: torch.Tensor) -> bool:
    """Whether some elements differ, NaN aside."""
    known = x.flatten() if not (x.is_floating_point() or x.is_complex()) else x.flatten()[~x.flatten().isnan()]
    return bool((known != known[:1]).any())
