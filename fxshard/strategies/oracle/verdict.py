"""The verdict on a rule: the combinations that it wrongly offers, and the valid ones that it misses.

A combination of input placements on one axis is valid if the operator, run on the shards of 3 and of 4 ranks, gives outputs
that form its outputs on whole tensors, each with some placement, for every variation of the values.
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
from fxshard.strategies.engine.registry import has_rule, own_collectives
from fxshard.strategies.oracle.case import Case, case_of
from fxshard.strategies.oracle.execution import leaves_empty, run_by_rule, run_on_shards
from fxshard.strategies.oracle.pieces import holds, valid_placements
from fxshard.strategies.oracle.samples import Sample
from fxshard.strategies.oracle.search import Combination, search
from fxshard.strategies.oracle.variants import variants

RANKS = (3, 4)
BUDGET = 2000
IDEMPOTENT = (Partial("avg"), Partial("max"), Partial("min"))
ADDITIVE = frozenset((Partial("sum"), Partial("avg"), Partial("product")))
"""Reductions whose parts cannot be compared where the result is not finite."""


@dataclass(frozen=True)
class Option:
    """One way to run a sample on one axis: placements of the inputs, and all valid placements of each output."""

    inputs: Combination
    outputs: tuple[tuple[Placement, ...], ...]

    def __str__(self) -> str:
        sides = (map(placement_str, self.inputs), ("|".join(map(placement_str, o)) or "-" for o in self.outputs))
        return " -> ".join(", ".join(side) for side in sides)


@dataclass(frozen=True)
class Finding:
    """An option of a sample; ``why`` it is wrong, empty for a missing one."""

    sample: Sample
    option: Option
    why: str = ""

    def __str__(self) -> str:
        return f"{self.option}  for ({self.sample})" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Judged:
    """The result for one sample: ``valid`` offered options, ``missing`` and ``wrong`` ones, and how many of the ``possible`` combinations
    were ``searched``.

    ``offered``: number of offered combinations that were run in local form, without the replicated one;
    ``skipped``: why the sample was not judged; ``partly``: why it was judged only for wrong options; ``variants``: number of calls with
    other numeric arguments that were judged for wrong options; ``masked``: number of non-finite positions, which were not compared.
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
    """The results for all samples of one operator; ``fallback``: it has no rule; ``note``: why its rule offers no more shardings.

    ``listed``: the options come from the user's function for DTensor, in place of a rule.
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
        """Number of valid offered options, without the replicated one."""
        return sum(len(j.valid) for j in self.judged)

    @property
    def offered(self) -> int:
        """Number of offered combinations that were run, without the replicated one."""
        return sum(j.offered for j in self.judged)

    @property
    def unsearched(self) -> int:
        return sum(j.possible - j.searched for j in self.judged)


def check_op(op: str, samples: Iterable[Sample], budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Verdict:
    """Judges the rule of ``op`` (``"aten.mm.default"``) by ``samples``; ``budget``: combinations tried per sample."""
    judged = tuple(judge(sample, budget, ranks) for sample in samples)
    calls = [c.call for c in (case_of(j.sample) for j in judged) if isinstance(c, Case)]
    strategies = [op_strategy(call, Mesh({"a": 2})) for call in calls[:1]]
    note = next((s.reason for s in (op_strategy(c, Mesh({"a": 2})) for c in calls) if s.reason), "")
    return Verdict(op, judged, any(s.fallback for s in strategies), note, not has_rule(op) and sharding_function(op) is not None)


def judge(sample: Sample, budget: int = BUDGET, ranks: Sequence[int] = RANKS) -> Judged:
    """Checks every offered spec on each number of ``ranks``, also for variants, and every other combination within the budget."""
    case = case_of(sample)
    if isinstance(case, str):
        return Judged(sample, skipped=case)
    others = [c for c in map(case_of, variants(sample)) if isinstance(c, Case) and c.is_defined]
    own = tuple(_wrongs(case, ranks))
    known = {_read(sample, option.inputs): option for option in (_option(spec) for _, spec in _specs(case, ranks))}
    wrong = (*own, *(f for other in others for f in _wrongs(other, ranks)))
    judged = Judged(sample, wrong=wrong, offered=sum(map(_is_split, known)), variants=len(others))
    if case.inconclusive:
        skipped = "" if sample.tensors else "it has no tensor operands"
        return replace(judged, skipped=skipped, partly="" if skipped else case.inconclusive, masked=_masked(case, known.values()))
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


def valid_options(sample: Sample, combinations: Sequence[Combination]) -> list[Option] | None:
    """The ``combinations`` that are valid for ``sample``; None if it is inconclusive."""
    case = case_of(sample)
    return None if isinstance(case, str) or case.inconclusive else list(_valid(case, combinations, RANKS))


def _is_split(combination: Combination) -> bool:
    return any(not isinstance(p, Replicate) for p in combination)


def _specs(case: Case, ranks: Sequence[int]) -> list[tuple[int, OpSpec]]:
    """The offered specs; those whose ranks communicate, or have rows from others, say nothing about the operator alone."""
    meshes = [(n, Mesh({"a": n})) for n in ranks]
    found = ((n, mesh, spec) for n, mesh in meshes for spec in op_strategy(case.call, mesh).specs)
    return [(n, spec) for n, mesh, spec in found if not (spec.is_on_experts or own_collectives(case.call, spec, mesh))]


def _wrongs(case: Case, ranks: Sequence[int]) -> Iterator[Finding]:
    return (f for n, spec in _specs(case, ranks) if (f := _wrong(case, spec, n)) is not None)


def _read(sample: Sample, inputs: Combination) -> Combination:
    """The combination with ``out=`` operands replicated."""
    return tuple(Replicate() if i in sample.outs else p for i, p in enumerate(inputs))


def _written(sample: Sample, option: Option) -> Option:
    """The option with each ``out=`` operand placed like its output."""
    return replace(option, inputs=tuple(option.outputs[sample.outs[i]][0] if i in sample.outs else p for i, p in enumerate(option.inputs)))


def _masked(case: Case, options: Iterable[Option]) -> int:
    """Number of non-finite positions in outputs that are pending in a sum, average or product; parts are not compared there."""
    tensors = [o for o, meta in enumerate(case.call.outputs) if meta is not None]
    rows = [o.outputs if len(o.outputs) == len(tensors) else [o.outputs[i] for i in tensors] for o in options]
    columns = zip(*rows, strict=True)
    return sum(
        case.infinite(o) for o, column in zip(tensors, columns, strict=False) if any(p in ADDITIVE for found in column for p in found)
    )


def _read_as(combination: Combination, known: Mapping[Combination, Option]) -> Option | None:
    """The offered option that accepts ``combination`` unchanged: a replicated tensor is also its own average, maximum and minimum."""
    for inputs, option in known.items():
        if all(a == b or (isinstance(a, Replicate) and b in IDEMPOTENT) for a, b in zip(combination, inputs, strict=True)):
            return option
    return None


def _option(spec: OpSpec) -> Option:
    return Option(tuple(layout[0] for layout in spec.inputs), tuple((layout[0],) for layout in spec.outputs))


def _wrong(case: Case, spec: OpSpec, ranks: int) -> Finding | None:
    for seed, (tensors, whole) in enumerate(case.values):
        try:
            results = run_by_rule(case.sample, case.call, tensors, spec, ranks, seed)
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
    """The placements of each output that hold in every run; None if some output has none.

    Runs with pending operands and an empty shard do not count: that rank runs nothing, so its part would be lost.
    """
    found: list[tuple[Placement, ...]] | None = None
    pending = any(isinstance(p, Partial) for p in combination)
    counted = [n for n in ranks if not (pending and leaves_empty(case.sample.tensors, combination, n))]
    for n, (seed, (tensors, whole)) in itertools.product(counted, enumerate(case.values)):
        try:
            results = run_on_shards(case.sample, tensors, combination, n, seed)
        except Exception:
            return None
        tensor_outputs = [(pieces, w) for pieces, w in zip(results, whole, strict=True) if isinstance(w, torch.Tensor)]
        here = [valid_placements(pieces, w, case.limit) for pieces, w in tensor_outputs]
        found = here if found is None else [tuple(p for p in a if p in b) for a, b in zip(found, here, strict=True)]
        if not found or not all(found):
            return None
    return None if found is None else tuple((Replicate(),) if Replicate() in valid else valid for valid in found)
