"""Discovers a rule for an operator from the combinations of placements that are valid for its samples.

Each valid combination with shards is a factor: the dims that are sharded together get one name. Combinations with
pending reductions only become linear groups.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard._torch_compat import pytree
from fxshard.errors import RuleError
from fxshard.graph.call import Operand
from fxshard.strategies.engine.factors import replicate_all
from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import temporary_rule
from fxshard.strategies.engine.user_rules import functional_schema
from fxshard.strategies.oracle.case import MIN_ELEMENTS, RANDOM
from fxshard.strategies.oracle.samples import Sample, operator, qualified, run
from fxshard.strategies.oracle.variants import variants
from fxshard.strategies.oracle.verdict import BUDGET, Judged, Option, check_op, judge, valid_options

Tensors = list[list[str]]


@dataclass(frozen=True)
class FoundRule:
    """``pattern`` and ``properties``: arguments of ``fxshard.register_rule``; ``left_out``: valid options that a rule in text form
    cannot express; ``untried``: number of combinations beyond the budget."""

    op: str
    pattern: str
    properties: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[Option, ...] = ()
    untried: int = 0

    @property
    def says_nothing(self) -> bool:
        """Whether the rule allows only replication, as having no rule does."""
        return not self.properties and not any(c.isalpha() for c in self.pattern)

    def __str__(self) -> str:
        namespace, name, overload = self.op.split(".")
        operator = f"{namespace}::{name}" + ("" if overload == "default" else f".{overload}")
        extra = "".join(f", {key}={value!r}" for key, value in self.properties.items())
        return f'fxshard.register_rule("{operator}", "{self.pattern}"{extra})'


def find_rule(op: str, samples: Sequence[Sample], budget: int = BUDGET) -> FoundRule:
    """A rule that holds for all ``samples``, whose tensors must have equal numbers of dims.

    Raises RuleError if the operator cannot have a rule, fails on a sample or is random, if the samples differ in their numbers of dims,
    or if none can tell a wrong combination from a right one.
    """
    name = qualified(op)
    _check_places_tensors(operator(name))
    if not samples:
        raise RuleError(f"there are no samples of {op}", remedy="give at least one")
    shapes = {_dims(s) for s in samples}
    if len(shapes) != 1:
        what = f"the samples of {op} have tensors with different numbers of dims: {sorted(shapes, key=str)}"
        raise RuleError(what, remedy="give samples of one kind at a time")
    with temporary_rule(name, replicate_all):  # so that options of an existing rule are discovered too
        options, untried = _valid_for_all(op, samples, budget)
    ((operands, outputs),) = shapes
    found = replace(_rule(name, operands, outputs, options, _positions(samples[0])), untried=untried)
    with temporary_rule(name, rule(found.pattern, **found.properties)):
        verdict = check_op(name, samples, 0)
    if verdict.wrong:
        what = f"no rule in text holds for {op}: {found} would offer {verdict.wrong[0]}"
        raise RuleError(what, remedy="write a function Call -> Factors, see docs/adding-an-operator.md")
    return found


def largest_kind(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of one kind (equal numbers of dims), for one rule: the kind with most conclusive samples, then with most samples."""
    kinds: dict[Any, list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(_dims(sample), []).append(sample)
    return max(
        kinds.values(), key=lambda group: (sum(all(t.numel() >= MIN_ELEMENTS for t in s.tensors) for s in group), len(group)), default=[]
    )


def _dims(sample: Sample) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    return tuple(t.ndim for t in sample.tensors), _ranks_of_outputs(sample)


def _check_places_tensors(overload: Any) -> None:
    """Raises RuleError if the operator mutates its arguments or returns values other than tensors: it cannot have a rule."""
    schema = functional_schema(overload, "find_rule")
    plain = [str(r.type) for r in schema.returns if "Tensor" not in str(r.type)]
    if plain or not schema.returns:
        what = f"{schema.name} returns {f'a plain {plain[0]}' if plain else 'nothing'}; only tensors have placements"
        raise RuleError(
            what, where="find_rule", remedy="return a tensor without dims in place of each number; without a rule it is replicated"
        )


def _valid_for_all(op: str, samples: Sequence[Sample], budget: int) -> tuple[list[Option], int]:
    """(options valid for all conclusive samples, number of combinations not tried). They must also hold for variants of the samples,
    because a rule in text form ignores numbers among the arguments."""
    judged = [judge(s, budget) for s in samples]
    telling = [j for j in judged if not j.skipped and j.searched]
    if not telling:
        raise _inconclusive_error(op, judged)
    options = _common([[f.option for f in j.missing] for j in telling])
    others = (valid_options(v, [o.inputs for o in options]) for s in samples for v in variants(s))
    return _common([options, *(o for o in others if o is not None)]), sum(j.possible - j.searched for j in telling)


def _inconclusive_error(op: str, judged: Sequence[Judged]) -> RuleError:
    if any(j.skipped == RANDOM for j in judged):
        remedy = "draw the random numbers with torch outside of it, where they do not depend on the mesh, and pass them as an argument"
        return RuleError(f"{op} gives other numbers each time that it runs, so no rule can be checked", remedy=remedy)
    why = next(j.skipped or j.partly for j in judged)
    remedy = f"give samples of several sizes, with at least {MIN_ELEMENTS} random numbers in each tensor"
    return RuleError(f"no sample of {op} is conclusive: {why}", remedy=remedy)


def _positions(sample: Sample) -> dict[int, int]:
    """Operand -> position of its argument, which may be a list; keyword arguments have none."""
    args, _ = sample.marked
    return {leaf.index: p for p, arg in enumerate(args) for leaf in pytree.tree_leaves(arg) if isinstance(leaf, Operand)}


def _ranks_of_outputs(sample: Sample) -> tuple[int | None, ...]:
    try:
        outputs = run(sample.op, sample.args, sample.kwargs)
    except Exception as error:
        what = f"{sample.op} fails on ({sample}): {type(error).__name__}: {error}"
        raise RuleError(what, remedy="give samples that it can run on") from error
    return tuple(o.ndim if isinstance(o, torch.Tensor) else None for o in outputs)


def _common(found: Sequence[Sequence[Option]]) -> list[Option]:
    """Options valid for all samples, with the output placements that all of them allow."""
    options = []
    for option in found[0]:
        others = [next((o for o in row if o.inputs == option.inputs), None) for row in found[1:]]
        if all(o is not None for o in others):
            columns = zip(option.outputs, *(o.outputs for o in others if o is not None), strict=True)
            outputs = tuple(tuple(p for p in column[0] if all(p in other for other in column)) for column in columns)
            if all(outputs):
                options.append(Option(option.inputs, outputs))
    return options


def _rule(
    op: str, operands: tuple[int, ...], outputs: tuple[int | None, ...], options: Sequence[Option], positions: dict[int, int]
) -> FoundRule:
    ins: Tensors = [[""] * n for n in operands]
    outs: Tensors = [[""] * (n or 0) for n in outputs]
    reduce: dict[str, str] = {}
    additive: set[int] = set()
    used: list[Option] = []
    cutting = [o for o in options if any(isinstance(p, Shard) for p in o.inputs)]
    for option in sorted(cutting, key=_priority):
        name = f"factor{len(used)}"
        if _is_expressible(option, ins, outs):
            _write(option, name, ins, outs, reduce, additive)
            used.append(option)
    linear = _linear((o for o in options if o not in cutting), positions)
    letters = _letters([*ins, *outs])
    kept = {letters[name]: op_ for name, op_ in reduce.items() if op_ != "sum"}
    properties: dict[str, Any] = {k: v for k, v in {"linear": linear, "additive": tuple(sorted(additive)), "reduce": kept}.items() if v}
    sides = (", ".join(" ".join(letters.get(n, "_") for n in dims) for dims in side) for side in (ins, outs))
    left = tuple(o for o in cutting if o not in used)
    return FoundRule(op, " -> ".join(sides), properties, left)


def _priority(option: Option) -> tuple[int, int]:
    """Sort key: options with fewer pending operands first, then those with more sharded ones."""
    pending = sum(isinstance(p, Partial) for p in option.inputs)
    return pending, -sum(isinstance(p, Shard) for p in option.inputs)


def _letters(tensors: Tensors) -> dict[str, str]:
    """a, b, c, ... in order of first occurrence."""
    names = dict.fromkeys(name for dims in tensors for name in dims if name)
    return {name: string.ascii_lowercase[i] if i < 26 else f"d{i}" for i, name in enumerate(names)}


def _is_expressible(option: Option, ins: Tensors, outs: Tensors) -> bool:
    """Whether the option can be one more factor of a rule in text form.

    Requires that none of its dims has a name yet, that unsharded outputs are all pending with one reduction, and that pending
    operands have the same one: these are additive.
    """
    free = all(not ins[i][p.dim] for i, p in enumerate(option.inputs) if isinstance(p, Shard))
    free = free and all(not outs[o][p[0].dim] for o, p in enumerate(option.outputs) if isinstance(p[0], Shard))
    pending = [p for p in option.inputs if isinstance(p, Partial)]
    partial = [p[0] for p in option.outputs if isinstance(p[0], Partial)]
    whole = any(isinstance(p[0], Replicate) for p in option.outputs)
    return free and not whole and len({*pending, *partial}) < 2 and (bool(partial) or not pending)


def _write(option: Option, name: str, ins: Tensors, outs: Tensors, reduce: dict[str, str], additive: set[int]) -> None:
    for i, placement in enumerate(option.inputs):
        if isinstance(placement, Shard):
            ins[i][placement.dim] = name
        elif isinstance(placement, Partial):
            additive.add(i)
    for o, found in enumerate(option.outputs):
        if isinstance(found[0], Shard):
            outs[o][found[0].dim] = name
        elif isinstance(found[0], Partial):
            reduce[name] = found[0].reduce_op


def _linear(options: Iterable[Option], positions: dict[int, int]) -> list[list[int]]:
    """Groups of arguments through which a pending sum passes to all outputs."""
    total = Partial("sum")
    of_sums = [o.inputs for o in options if all(total in found for found in o.outputs)]
    sums = [inputs for inputs in of_sums if all(isinstance(p, Replicate) or p == total for p in inputs)]
    groups = [[i for i, p in enumerate(inputs) if p == total] for inputs in sums]
    by_position = {tuple(dict.fromkeys(positions[i] for i in group)) for group in groups if all(i in positions for i in group)}
    return [list(group) for group in sorted(by_position)]
