"""The verdict on a rule: combinations that it offers and that are wrong, and valid ones that it does not offer.

A combination of input placements on one axis is valid when the outputs of the operator, run on the shards of 3 and of 4
ranks, make up its outputs on the whole, each output by some placement of its own, for every variation of the values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import placement_str
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies.engine.engine import op_strategy
from fxshard.strategies.engine.registered_sharding import sharding_function
from fxshard.strategies.engine.registry import has_rule
from fxshard.strategies.oracle.case import Case, case_of
from fxshard.strategies.oracle.execution import by_rule, leaves_empty, on_shards
from fxshard.strategies.oracle.pieces import holds, valid_placements
from fxshard.strategies.oracle.plain import variants
from fxshard.strategies.oracle.samples import Sample
from fxshard.strategies.oracle.search import Combination, search

RANKS = (3, 4)
BUDGET = 2000
IDEMPOTENT = (Partial("avg"), Partial("max"), Partial("min"))
ADDED = frozenset((Partial("sum"), Partial("avg"), Partial("product")))
"""Pending in these, a number that is not finite has no parts."""


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
    """One sample: ``valid`` options that are offered, ``missing`` ones, ``wrong`` ones, and how many of ``possible`` were tried.

    ``offered``: combinations, the replicated one not counted, that the rule offers and that were run as a rank would run them;
    ``skipped``: why it is not judged; ``partly``: why it is judged for what is wrong only; ``variants``: calls with other
    plain numbers that were judged for what is wrong; ``masked``: positions of results that are not finite, so not compared.
    """

    sample: Sample
    valid: tuple[Option, ...] = ()
    missing: tuple[Finding, ...] = ()
    wrong: tuple[Finding, ...] = ()
    offered: int = 0
    searched: int = 0
    possible: int = 0
    skipped: str = ""
    partly: str = ""
    variants: int = 0
    masked: int = 0


@dataclass(frozen=True)
class Verdict:
    """The samples of one operator, judged; ``fallback``: it has no rule; ``note``: why its rule offers no more.

    ``listed``: what is judged is the user's function for DTensor, which stands in for a rule.
    """

    op: str
    judged: tuple[Judged, ...]
    fallback: bool = False
    note: str = ""
    listed: bool = False

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
    def offered(self) -> int:
        """How many offered combinations were run, the replicated one not counted."""
        return sum(j.offered for j in self.judged)

    @property
    def unsearched(self) -> int:
        return sum(j.possible - j.searched for j in self.judged)


def check_op(op: str, samples: Iterable[Sample], budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Verdict:
    """Judges the rule of ``op`` (``"aten.mm.default"``) by ``samples``; ``budget``: combinations tried for one sample."""
    judged = tuple(judge(sample, budget, ranks) for sample in samples)
    calls = [c.call for c in (case_of(j.sample) for j in judged) if isinstance(c, Case)]
    strategies = [op_strategy(call, Mesh({"a": 2})) for call in calls[:1]]
    note = next((s.reason for s in (op_strategy(c, Mesh({"a": 2})) for c in calls) if s.reason), "")
    return Verdict(op, judged, any(s.fallback for s in strategies), note, not has_rule(op) and sharding_function(op) is not None)


def judge(sample: Sample, budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Judged:
    """Every offered spec on each of ``ranks``, with other plain numbers too, and every other combination that the budget allows."""
    case = case_of(sample)
    if isinstance(case, str):
        return Judged(sample, skipped=case)
    others = [c for c in map(case_of, variants(sample)) if isinstance(c, Case) and c.is_defined]
    own = tuple(_wrongs(case, ranks))
    known = {_read(sample, option.inputs): option for option in (_option(spec) for _, spec in _specs(case, ranks))}
    wrong = (*own, *(f for other in others for f in _wrongs(other, ranks)))
    judged = Judged(sample, wrong=wrong, offered=sum(map(_is_split, known)), variants=len(others))
    if case.quiet:
        skipped = "" if sample.tensors else "it has no tensor operands"
        return replace(judged, skipped=skipped, partly="" if skipped else case.quiet, masked=_masked(case, known.values()))
    found = search(sample.op, sample.tensors, list(known), budget, sample.outs)
    offered = {c: known.get(c) or _read_as(c, known) for c in found.combinations}
    bad = {f.option.inputs for f in own}
    valid = tuple(_written(sample, Option(c, o.outputs)) for c, o in offered.items() if o is not None and o.inputs not in bad)
    missing = tuple(_written(sample, o) for o in _valid(case, [c for c, o in offered.items() if o is None], ranks))
    return replace(
        judged,
        valid=valid,
        missing=tuple(Finding(sample, o) for o in missing),
        searched=len(found.combinations),
        possible=found.possible,
        partly=found.why,
        masked=_masked(case, [*known.values(), *missing]),
    )


def holding(sample: Sample, combinations: Sequence[Combination], ranks: Sequence[int] = RANKS) -> list[Option] | None:
    """Those of ``combinations`` that are valid for ``sample``; None where it cannot tell."""
    case = case_of(sample)
    return None if isinstance(case, str) or case.quiet else list(_valid(case, combinations, ranks))


def _is_split(combination: Combination) -> bool:
    return any(not isinstance(p, Replicate) for p in combination)


def _specs(case: Case, ranks: Sequence[int]) -> list[tuple[int, OpSpec]]:
    return [(n, spec) for n in ranks for spec in op_strategy(case.call, Mesh({"a": n})).specs]


def _wrongs(case: Case, ranks: Sequence[int]) -> Iterator[Finding]:
    return (f for n, spec in _specs(case, ranks) if (f := _wrong(case, spec, n)) is not None)


def _read(sample: Sample, inputs: Combination) -> Combination:
    """A combination with replicated operands in place of those that are only written into."""
    return tuple(Replicate() if i in sample.outs else p for i, p in enumerate(inputs))


def _written(sample: Sample, option: Option) -> Option:
    """An option in which what is written into lies as the output."""
    return replace(option, inputs=tuple(option.outputs[sample.outs[i]][0] if i in sample.outs else p for i, p in enumerate(option.inputs)))


def _masked(case: Case, options: Iterable[Option]) -> int:
    """Positions of results that are not finite and pending in a sum by some option: there its parts are not compared."""
    tensors = [o for o, meta in enumerate(case.call.outputs) if meta is not None]
    rows = [o.outputs if len(o.outputs) == len(tensors) else [o.outputs[i] for i in tensors] for o in options]
    columns = zip(*rows, strict=True)
    return sum(case.infinite(o) for o, column in zip(tensors, columns, strict=False) if any(p in ADDED for found in column for p in found))


def _read_as(combination: Combination, known: Mapping[Combination, Option]) -> Option | None:
    """The offered option that takes ``combination`` as it is: a replicated tensor is its own average, maximum and minimum."""
    for inputs, option in known.items():
        if all(a == b or (isinstance(a, Replicate) and b in IDEMPOTENT) for a, b in zip(combination, inputs, strict=True)):
            return option
    return None


def _option(spec: OpSpec) -> Option:
    return Option(tuple(layout[0] for layout in spec.inputs), tuple((layout[0],) for layout in spec.outputs))


def _wrong(case: Case, spec: OpSpec, ranks: int) -> Finding | None:
    for seed, (tensors, whole) in enumerate(case.values):
        try:
            results = by_rule(case.sample, case.call, tensors, spec, ranks, seed)
        except Exception as error:
            return Finding(case.sample, _option(spec), f"on {ranks} ranks: {type(error).__name__}: {error}")
        for o, (pieces, expected) in enumerate(zip(results, whole, strict=True)):
            if isinstance(expected, torch.Tensor) and not holds(pieces, expected, spec.outputs[o][0], case.limit):
                return Finding(case.sample, _option(spec), f"on {ranks} ranks, output {o} is not that of the whole (variation {seed})")
    return None


def _valid(case: Case, combinations: Iterable[Combination], ranks: Sequence[int]) -> Iterator[Option]:
    for combination in combinations:
        outputs = _outputs(case, combination, ranks)
        if outputs is not None:
            yield Option(combination, outputs)


def _outputs(case: Case, combination: Combination, ranks: Sequence[int]) -> tuple[tuple[Placement, ...], ...] | None:
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
