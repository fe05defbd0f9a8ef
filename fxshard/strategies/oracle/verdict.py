"""The verdict on a rule: combinations that it offers and that are wrong, and valid ones that it does not offer.

A combination of input placements on one axis is valid when the outputs of the operator, run on the shards of 3 and of 4
ranks, make up its outputs on the whole, each output by some placement of its own, for every variation of the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard.call import Call
from fxshard.layout import placement_str
from fxshard.mesh import Mesh
from fxshard.sharding_plan import OpSpec
from fxshard.strategies.engine import op_strategy
from fxshard.strategies.oracle.execution import by_rule, leaves_empty, on_shards
from fxshard.strategies.oracle.pieces import close, holds, tolerance, valid_placements
from fxshard.strategies.oracle.samples import Sample, call_of_sample, filled, run, variations
from fxshard.strategies.oracle.search import Combination, search

RANKS = (3, 4)
BUDGET = 2000
FEWEST = 6
"""Elements of an operand below which a combination may hold by accident."""
UNDEFINED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize", "resize_")
"""Operators whose numbers are what lay in memory."""
IDEMPOTENT = (Partial("avg"), Partial("max"), Partial("min"))


@dataclass(frozen=True)
class Option:
    """One way to run a sample on one axis: placements of the inputs, and of each output all that are valid."""

    inputs: Combination
    outputs: tuple[tuple[Placement, ...], ...]

    def __str__(self) -> str:
        sides = (map(placement_str, self.inputs), ("|".join(map(placement_str, o)) or "-" for o in self.outputs))
        return " -> ".join(", ".join(side) for side in sides)


@dataclass(frozen=True)
class Finding:
    """An option of a sample, and what is wrong with it (empty for one that is missing)."""

    sample: Sample
    option: Option
    why: str = ""

    def __str__(self) -> str:
        return f"{self.option}  for ({self.sample})" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Judged:
    """One sample: ``valid`` options that are offered, ``missing`` ones, ``wrong`` ones, and how many of ``possible`` were tried."""

    sample: Sample
    valid: tuple[Option, ...] = ()
    missing: tuple[Finding, ...] = ()
    wrong: tuple[Finding, ...] = ()
    searched: int = 0
    possible: int = 0
    skipped: str = ""


@dataclass(frozen=True)
class Verdict:
    """The samples of one operator, judged; ``fallback``: it has no rule; ``note``: why its rule offers no more."""

    op: str
    judged: tuple[Judged, ...]
    fallback: bool = False
    note: str = ""

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(itertools.chain.from_iterable(j.wrong for j in self.judged))

    @property
    def missing(self) -> tuple[Finding, ...]:
        return tuple(itertools.chain.from_iterable(j.missing for j in self.judged))

    @property
    def valid(self) -> int:
        """How many valid options are offered, the replicated one not counted."""
        return sum(len(j.valid) for j in self.judged)

    @property
    def unsearched(self) -> int:
        return sum(j.possible - j.searched for j in self.judged)


@dataclass(frozen=True)
class _Case:
    """A sample in each variation in which its operator runs: operands, and outputs on the whole."""

    sample: Sample
    call: Call
    values: tuple[tuple[list[torch.Tensor], tuple[Any, ...]], ...] = field(default=())

    @property
    def limit(self) -> float:
        return tolerance(self.sample.tensors)

    @property
    def is_telling(self) -> bool:
        """Whether a wrong combination would show: in some variation, operands of some size whose elements differ, and outputs
        whose elements do; a lone number must differ between variations."""
        if not all(t.numel() >= FEWEST for t in self.sample.tensors):
            return False
        telling = [outputs for tensors, outputs in self.values if all(map(_tells, tensors))]
        columns = zip(*([o for o in outputs if isinstance(o, torch.Tensor)] for outputs in telling), strict=True)
        return bool(telling) and all(_tells(torch.stack(o)) if o[0].numel() == 1 else any(map(_tells, o)) for o in columns)


def check_op(op: str, samples: Sequence[Sample], budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Verdict:
    """Judges the rule of ``op`` (``"aten.mm.default"``) by ``samples``; ``budget``: combinations tried for one sample."""
    judged = tuple(judge(sample, budget, ranks) for sample in samples)
    calls = [c.call for c in map(_case, samples) if isinstance(c, _Case)]
    strategies = [op_strategy(call, Mesh({"a": 2})) for call in calls[:1]]
    note = next((s.reason for s in (op_strategy(c, Mesh({"a": 2})) for c in calls) if s.reason), "")
    return Verdict(op, judged, any(s.fallback for s in strategies), note)


def judge(sample: Sample, budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Judged:
    """Every offered spec on each of ``ranks``, and every other combination that the budget allows."""
    case = _case(sample)
    if isinstance(case, str):
        return Judged(sample, skipped=case)
    specs = [(spec, n) for n in ranks for spec in op_strategy(case.call, Mesh({"a": n})).specs]
    wrong = tuple(f for f in (_wrong(case, spec, n) for spec, n in specs) if f is not None)
    if not case.is_telling:
        return Judged(sample, wrong=wrong, skipped="" if sample.tensors else "it has no tensor operands")
    known = {_inputs(spec): _option(spec) for spec, _ in specs}
    found = search(sample.op, sample.tensors, list(known), budget)
    offered = {c: known.get(c) or _read_as(c, known) for c in found.combinations}
    bad = {f.option.inputs for f in wrong}
    valid = tuple(Option(c, o.outputs) for c, o in offered.items() if o is not None and o.inputs not in bad)
    missing = [Finding(sample, o) for o in _valid(case, [c for c, o in offered.items() if o is None], ranks)]
    return Judged(sample, valid, tuple(missing), wrong, len(found.combinations), found.possible)


def _read_as(combination: Combination, known: Mapping[Combination, Option]) -> Option | None:
    """The offered option that takes ``combination`` as it is: a replicated tensor is its own average, maximum and minimum."""
    for inputs, option in known.items():
        if all(a == b or (isinstance(a, Replicate) and b in IDEMPOTENT) for a, b in zip(combination, inputs, strict=True)):
            return option
    return None


def _case(sample: Sample) -> _Case | str:
    """A sample with what its operator gives on the whole; a text: why it cannot be judged."""
    if sample.op.split(".")[1] in UNDEFINED:
        return "its numbers are undefined"
    try:
        outputs, again = (run(sample.op, *filled(sample, [t.clone() for t in sample.tensors])) for _ in range(2))
    except Exception as error:
        return f"the operator fails on it: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not all(_same(a, b) for a, b in zip(outputs, again, strict=True)):
        return "two runs differ: its result is random or undefined"
    call = call_of_sample(sample, outputs)
    return _Case(sample, call, tuple(_values(sample, outputs)))


def _values(sample: Sample, outputs: tuple[Any, ...]) -> Iterator[tuple[list[torch.Tensor], tuple[Any, ...]]]:
    """Variations outside of the operator's domain, or whose outputs have other shapes, are left out."""
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


def _tells(x: torch.Tensor) -> bool:
    """Not all elements alike."""
    known = x.flatten() if not (x.is_floating_point() or x.is_complex()) else x.flatten()[~x.flatten().isnan()]
    return bool((known != known[:1]).any())


def _inputs(spec: OpSpec) -> Combination:
    return tuple(layout[0] for layout in spec.inputs)


def _option(spec: OpSpec) -> Option:
    return Option(_inputs(spec), tuple((layout[0],) for layout in spec.outputs))


def _wrong(case: _Case, spec: OpSpec, ranks: int) -> Finding | None:
    for seed, (tensors, whole) in enumerate(case.values):
        try:
            results = by_rule(case.sample, case.call, tensors, spec, ranks, seed)
        except Exception as error:
            return Finding(case.sample, _option(spec), f"on {ranks} ranks: {type(error).__name__}: {error}")
        for o, (pieces, expected) in enumerate(zip(results, whole, strict=True)):
            if isinstance(expected, torch.Tensor) and not holds(pieces, expected, spec.outputs[o][0], case.limit):
                return Finding(case.sample, _option(spec), f"on {ranks} ranks, output {o} is not that of the whole (variation {seed})")
    return None


def _valid(case: _Case, combinations: Iterable[Combination], ranks: Sequence[int]) -> Iterator[Option]:
    for combination in combinations:
        outputs = _outputs(case, combination, ranks)
        if outputs is not None:
            yield Option(combination, outputs)


def _outputs(case: _Case, combination: Combination, ranks: Sequence[int]) -> tuple[tuple[Placement, ...], ...] | None:
    """By output, the placements that hold in every run; None when some output has none.

    A rank with an empty shard runs nothing, and its part of a pending operand would be lost: such runs do not count.
    """
    found: list[tuple[Placement, ...]] | None = None
    pending = any(isinstance(p, Partial) for p in combination)
    counted = [n for n in ranks if not (pending and leaves_empty(case.sample.tensors, combination, n))]
    for n, (seed, (tensors, whole)) in itertools.product(counted, enumerate(case.values)):
        try:
            results = on_shards(case.sample, tensors, combination, n, seed)
        except Exception:
            return None
        tensor_outputs = [(pieces, w) for pieces, w in zip(results, whole, strict=True) if isinstance(w, torch.Tensor)]
        here = [valid_placements(pieces, w, case.limit) for pieces, w in tensor_outputs]
        found = here if found is None else [tuple(p for p in a if p in b) for a, b in zip(found, here, strict=True)]
        if not found or not all(found):
            return None
    return None if found is None else tuple((Replicate(),) if Replicate() in valid else valid for valid in found)
