"""From rules to strategies: the options of one axis, and their legal combinations on a mesh.

A combination is legal if all dims that share a factor are cut at the same places on every rank: each shard of a dim (a b) must be
b times as long as that of a. Otherwise uneven and empty shards are legal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat import OpOverload
from fxshard.graph.call import Call, TensorMeta
from fxshard.layout.layouts import REDUCE_OPS, Layout, nested_chunk, parts_of, sharded_dim
from fxshard.layout.steps import reductions_commute
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies.engine.conversion import commutes_with_conversion, has_reduction, is_inexact
from fxshard.strategies.engine.expert_option import MATRICES, NAME, TOKENS, by_row, own_option
from fxshard.strategies.engine.factors import Factors, Linear, is_one, known_equal, replicate_all, resolve
from fxshard.strategies.engine.packed import Packs
from fxshard.strategies.engine.registered_sharding import options_from, sharding_function
from fxshard.strategies.engine.registry import has_rule, lookup, on_change
from fxshard.views.fallbacks import NO_RULE


@dataclass(frozen=True)
class AxisOption:
    """One way to run an operator on one axis. ``factor``: the sharded factor; None if all tensors are replicated or partial. ``once``: at
    most one axis of a mesh runs it so, because its ranks communicate."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None = None
    once: bool = False


@dataclass(frozen=True)
class OpStrategy:
    """All legal ways to run one call on a mesh; ``fallback``: it has no rule and is replicated, for ``reason``."""

    specs: tuple[OpSpec, ...]
    fallback: bool = False
    reason: str = ""


@dataclass(frozen=True)
class _ShardingCondition:
    """The conditions for sharding a factor of ``size``: aligned cuts in merged dims (``inner``: sizes of the rest of these dims), no empty
    shards (``full``), equal shards (``even``). ``parts``: of a packed factor, each of which must meet them; only one axis may cut it.
    ``tokens``: the factor of the tokens whose rows travel: an inner axis may cut it too only if all shards are equal."""

    size: Any
    inner: tuple[Any, ...]
    full: bool
    even: bool
    parts: tuple[int, ...] = ()
    tokens: str = ""


@dataclass(frozen=True)
class _Options:
    """``conflicts``: pairs of factors that exclude each other, because they shard the same dim of a tensor differently."""

    options: tuple[AxisOption, ...]
    conditions: dict[str, _ShardingCondition]
    fallback: bool
    note: str
    conflicts: frozenset[frozenset[str]] = frozenset()


def op_strategy(call: Call, mesh: Mesh, reductions: Iterable[str] = REDUCE_OPS, packs: Packs = (), on_experts: bool = False) -> OpStrategy:
    """All legal specs of ``call`` on ``mesh``, replicated first, in a fixed order.

    ``reductions``: the pending reductions that may pass through the operator; a graph in which only sums occur needs only those.
    ``packs``: the dims that may be packed, () for none. ``on_experts``: its operands may be rows that lie on the ranks of their experts.
    """
    wanted = tuple(op for op in REDUCE_OPS if op in set(reductions))
    if not call.is_hashable:
        return _strategy(call, mesh.shape, wanted, packs, on_experts)
    function = None if has_rule(call.op) else sharding_function(call.op)
    return _cached(call, mesh.shape, wanted, function, packs, on_experts)


def created_reductions(call: Call) -> frozenset[str]:
    """Reductions that some sharding of ``call`` leaves pending in an output."""
    sharded = (option for option in _options(call).options if option.factor is not None)
    return frozenset(p.reduce_op for option in sharded for p in option.outputs if isinstance(p, Partial))


def passed_reductions(call: Call) -> frozenset[tuple[str, str]]:
    """Pairs (reduction pending in an operand, reduction then pending in an output) that ``call`` passes through."""
    whole = (option for option in _options(call).options if option.factor is None)
    ends = ([{p.reduce_op for p in side if isinstance(p, Partial)} for side in (o.inputs, o.outputs)] for o in whole)
    return frozenset(pair for before, after in ends for pair in itertools.product(before, after))


def outputs_from(call: Call, given: Sequence[Placement | None]) -> tuple[Placement, ...] | None:
    """The placements of the outputs on an axis if ``call`` reads operands as ``given`` (None for those that may lie in any way) without
    communication; None if that is not possible, or not in one way only."""
    if (entry := lookup(call.op)) is None or entry.collectives is not None:
        return None
    options = (option for option in _options(call).options if not option.once)
    found = {o.outputs for o in options if all(p in (None, read) for p, read in zip(given, o.inputs, strict=True))}
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=2048)
def _cached(call: Call, shape: tuple[int, ...], reductions: tuple[str, ...], function: Any, packs: Packs, on_experts: bool) -> OpStrategy:
    """``function``: the one given to torch's ``register_sharding``; part of the key, because torch reports no changes."""
    return _strategy(call, shape, reductions, packs, on_experts)


def cache_info() -> Any:
    """Hits, misses and size of the cache of strategies."""
    return _cached.cache_info()


def cache_clear() -> None:
    """Empties the cache of strategies; registering a rule does so too."""
    _cached.cache_clear()


on_change(cache_clear)


_UNSHARDABLE = {
    "fxshard_users.triton_kernel.default": (
        "a call of a Triton kernel holds the sizes of whole tensors; wrapped in a custom operator, it can have a rule"
    )
}
"""Operators that no rule could shard, and why."""


def _missing_rule_reason(call: Call) -> str:
    """Why a call without a rule is replicated. An operator among the arguments is a mutating one that torch wrapped."""
    inner = call.args[0] if call.args else None
    if isinstance(inner, OpOverload):
        return f"{inner} changes its arguments, so it can have no rule; an operator that returns new tensors can"
    return _UNSHARDABLE.get(call.op, f"{NO_RULE} {call.op}")


def resolved_rule(call: Call) -> tuple[Factors, dict[str, Any]] | None:
    """The factors of a call and their sizes; None if it has no rule of its own."""
    entry = lookup(call.op)
    return None if entry is None else resolve(entry.rule(call), call)


def _options(call: Call, packs: Packs = (), on_experts: bool = False) -> _Options:
    entry = lookup(call.op)
    function = None if entry else sharding_function(call.op)
    if function is not None:
        return _options_from_placements(call, options_from(call, function))
    given = entry.rule(call) if entry else replicate_all(call, _missing_rule_reason(call))
    rule, sizes = resolve(given, call)
    found = [_replicated(call)]
    conditions: dict[str, _ShardingCondition] = {}
    excluded: set[frozenset[str]] = set()
    for factor in _shardable(rule, sizes):
        option = _sharded(rule, factor)
        if option is not None:
            found.append(option)
            conditions[factor] = _condition(rule, factor, sizes, option)
    for pair in rule.together:
        option = _sharded_together(rule, pair, sizes)
        if option is not None and option.factor is not None:
            found.append(option)
            conditions[option.factor] = _ShardingCondition(sizes[pair[0]], (), False, False)
            excluded |= {frozenset((option.factor, factor)) for factor in pair}
    found += _packed(call, packs, rule, sizes, conditions)
    if packs:
        excluded |= _conflicts(found, only_packed=True)
    if rule.on_experts is not None and (own := own_option(rule, sizes)) is not None:
        found.append(AxisOption(*own, NAME))
        conditions[NAME] = _ShardingCondition(sizes[TOKENS], (), False, False, tokens=TOKENS)
        excluded.add(frozenset((NAME, MATRICES)))
    elif on_experts and entry is not None and entry.ignores_position and (rows := by_row(rule)) is not None:
        found.append(AxisOption(*rows, NAME))
        conditions[NAME] = _ShardingCondition(None, (), False, False)
    found += _pending(rule, call)
    distinct = {(o.inputs, o.outputs): o for o in reversed(found) if _obeys(rule, o) and (o.factor is None or _reducible(call, o))}
    return _Options(tuple(reversed(distinct.values())), conditions, entry is None, rule.note, frozenset(excluded))


def _packed(
    call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any], conditions: dict[str, _ShardingCondition]
) -> Iterator[AxisOption]:
    """Options on packed dims; adds their conditions to ``conditions``."""
    entry = lookup(call.op)
    form = entry.packed_form if entry and packs else None
    for number, given in enumerate(form(call, packs, rule, sizes) if form else ()):
        option = AxisOption(given.inputs, given.outputs, f"packed {number}")
        conditions[f"packed {number}"] = _ShardingCondition(sum(given.parts), given.inner, given.full, _averages(option), given.parts)
        yield option


def _options_from_placements(call: Call, pairs: Iterable[tuple[tuple[Placement, ...], tuple[Placement, ...]]]) -> _Options:
    """Options from a list of placements; the sharded dims of one option act as one factor of their own."""
    whole = _replicated(call)
    found = {(whole.inputs, whole.outputs): whole}
    conditions: dict[str, _ShardingCondition] = {}
    for number, (inputs, outputs) in enumerate(pairs):
        sizes = [*_sharded_sizes(inputs, call.operands), *_sharded_sizes(outputs, call.outputs)]
        option = AxisOption(inputs, outputs, f"option {number}" if sizes else None)
        if _reducible(call, option) and not any(is_one(size) for size in sizes):
            found.setdefault((inputs, outputs), option)
            if option.factor is not None:
                conditions[option.factor] = _common_condition(sizes, option)
    return _Options(tuple(found.values()), conditions, False, "", _conflicts(found.values()))


def _conflicts(options: Iterable[AxisOption], only_packed: bool = False) -> frozenset[frozenset[str]]:
    """Pairs of listed options that shard a common dim; unlike factors of a rule, such options may combine it with different dims.

    ``only_packed``: pairs of which one packs the dim."""
    named = {o.factor: (*o.inputs, *o.outputs) for o in options if o.factor}
    dims = {f: {(k, d) for k, p in enumerate(places) if (d := sharded_dim(p)) is not None} for f, places in named.items()}
    packed = {f: {(k, p.dim) for k, p in enumerate(places) if parts_of(p)} for f, places in named.items()}
    pairs = itertools.combinations(dims, 2)
    return frozenset(frozenset((a, b)) for a, b in pairs if (dims[a] & dims[b] & (packed[a] | packed[b] if only_packed else dims[a])))


def _sharded_sizes(placements: Iterable[Placement], metas: Iterable[TensorMeta | None]) -> list[Any]:
    return [m.shape[p.dim] for p, m in zip(placements, metas, strict=True) if isinstance(p, Shard) and m is not None]


def _common_condition(sizes: list[Any], option: AxisOption) -> _ShardingCondition:
    """Dims of different sizes are cut at the same places in units of their greatest common divisor; symbolic sizes must be equal."""
    unit = sizes[0] if all(known_equal(size, sizes[0]) for size in sizes) else math.gcd(*sizes)
    inner = tuple(dict.fromkeys(size // unit for size in sizes if not known_equal(size, unit)))
    return _ShardingCondition(unit, inner, any(isinstance(p, Replicate) for p in option.outputs), _averages(option))


def _averages(option: AxisOption) -> bool:
    """Whether sharding leaves an average over ranks, which is right only for equal shards."""
    return any(isinstance(p, Partial) and p.reduce_op == "avg" for p in option.outputs)


def _replicated(call: Call) -> AxisOption:
    return AxisOption((Replicate(),) * len(call.operands), (Replicate(),) * len(call.outputs))


def _shardable(rule: Factors, sizes: dict[str, Any]) -> list[str]:
    """Factors in order of first occurrence, without replicated ones and those of size below 2."""
    tensors = [*rule.operands, *(o for o in rule.outputs if o is not None)]
    order = dict.fromkeys(f for dims in tensors for dim in dims for f in dim)
    return [f for f in order if f not in rule.replicated and not (isinstance(sizes[f], int) and sizes[f] < 2)]


def _sharded(rule: Factors, factor: str) -> AxisOption | None:
    """Each tensor sharded on the dim that has ``factor``; None if that is impossible."""
    inputs = [_dim_of(dims, factor) for dims in rule.operands]
    outputs = [None if dims is None else _dim_of(dims, factor) for dims in rule.outputs]
    reduce = rule.reduce.get(factor, "sum")
    partial = [_depends_on(rule, o, inputs) and d is None for o, d in enumerate(outputs)]
    if -1 in inputs or -1 in outputs or (any(partial) and reduce is None):
        return None
    missing: Placement = Partial(reduce) if any(partial) and reduce else Replicate()
    ins = [Shard(d) if d is not None else missing if i in rule.additive else Replicate() for i, d in enumerate(inputs)]
    outs = [Shard(d) if d is not None else missing if is_partial else Replicate() for d, is_partial in zip(outputs, partial, strict=True)]
    return AxisOption(tuple(ins), tuple(outs), factor)


def _sharded_together(rule: Factors, pair: tuple[str, str], sizes: dict[str, Any]) -> AxisOption | None:
    """Each tensor sharded on the dim of either factor; None if a factor is too short."""
    if any(isinstance(size := sizes.get(factor, 1), int) and size < 2 for factor in pair):
        return None
    tensors = [*rule.operands, *(o for o in rule.outputs if o is not None)]
    cut = [next((d for d in (_dim_of(dims, factor) for factor in pair) if d is not None), None) for dims in tensors]
    placed = [Replicate() if d is None else Shard(d) for d in cut]
    ins, outs = placed[: len(rule.operands)], iter(placed[len(rule.operands) :])
    return AxisOption(tuple(ins), tuple(Replicate() if o is None else next(outs) for o in rule.outputs), " ".join(pair), once=True)


def _dim_of(dims: tuple[tuple[str, ...], ...], factor: str) -> int | None:
    """The dim whose outermost factor is ``factor``; None if no dim has it, -1 if it is not outermost or occurs twice."""
    places = [(d, dim.index(factor)) for d, dim in enumerate(dims) if factor in dim]
    if not places:
        return None
    return places[0][0] if len(places) == 1 and places[0][1] == 0 else -1


def _depends_on(rule: Factors, output: int, inputs: list[int | None]) -> bool:
    """Whether an output depends on an operand that has the factor; if the output itself lacks the factor, it is then partial."""
    if rule.outputs[output] is None:
        return False
    sources = range(len(inputs)) if rule.depends is None else rule.depends[output]
    return any(inputs[i] is not None for i in sources)


def _condition(rule: Factors, factor: str, sizes: dict[str, Any], option: AxisOption) -> _ShardingCondition:
    """Empty shards are excluded if an output stays whole or an operand is added to a partial output, as all ranks must compute then, or if
    the rule excludes them."""
    tensors = [*rule.operands, *(o for o in rule.outputs if o is not None)]
    merged = [dim for dims in tensors for dim in dims if len(dim) > 1 and dim[0] == factor]
    inner = dict.fromkeys(math.prod(sizes[f] for f in dim[1:]) for dim in merged)
    whole = any(isinstance(p, Replicate) and d is not None for p, d in zip(option.outputs, rule.outputs, strict=True))
    added = any(isinstance(option.inputs[i], Partial) for i in rule.additive)
    return _ShardingCondition(sizes[factor], tuple(inner), whole or added or rule.filled, _averages(option))


def _pending(rule: Factors, call: Call) -> Iterator[AxisOption]:
    """Options that pass a pending reduction through: by one linear group, or by two without common operands or outputs."""
    groups = [group for group in rule.linear if group.operands]
    found = [(g, op, _outputs_of(rule, g)) for g in groups for op in g.ops if _is_exact(call, rule, g, op)]
    for passed in (*((f,) for f in found), *itertools.combinations(found, 2)):
        if len(passed) == 1 or not (_overlap(*(g.operands for g, _, _ in passed)) or _overlap(*(outs for _, _, outs in passed))):
            ins = {i: op for group, op, _ in passed for i in group.operands}
            outs = {o: group.result(op) for group, op, affected in passed for o in affected}
            yield AxisOption(_placements(ins, len(call.operands)), _placements(outs, len(call.outputs)))


def _outputs_of(rule: Factors, group: Linear) -> tuple[int, ...]:
    """The outputs that depend on the values of a group's operands."""
    if group.unread:
        return ()
    tensors = [o for o, dims in enumerate(rule.outputs) if dims is not None]
    return tuple(o for o in tensors if rule.depends is None or set(rule.depends[o]) & set(group.operands))


def _overlap(a: Iterable[int], b: Iterable[int]) -> bool:
    return bool(set(a) & set(b))


def _placements(pending: dict[int, str], count: int) -> tuple[Placement, ...]:
    return tuple(Partial(pending[i]) if i in pending else Replicate() for i in range(count))


def _is_exact(call: Call, rule: Factors, group: Linear, op: str) -> bool:
    """Whether the reduction exists for all dtypes of the group, and commutes with the conversions from operands to outputs."""
    ins = [call.operands[i].dtype for i in group.operands]
    outs = [o.dtype for o in (call.outputs[i] for i in _outputs_of(rule, group)) if o is not None]
    if group.real and not all(map(is_inexact, ins)):
        return False
    possible = all(has_reduction(op, d) for d in ins) and all(has_reduction(group.result(op), d) for d in outs)
    return possible and (not group.converts or all(commutes_with_conversion(op, a, b) for a in ins for b in outs))


def _reducible(call: Call, option: AxisOption) -> bool:
    """Whether each reduction of the option exists for its dtype, and commutes with the conversions from operands to outputs."""
    ins, outs = _pending_dtypes(option.inputs, call.operands), _pending_dtypes(option.outputs, call.outputs)
    possible = all(has_reduction(op, dtype) for op, dtype in (*ins, *outs))
    return possible and all(commutes_with_conversion(op, source, target) for op, source in ins for _, target in outs)


def _pending_dtypes(placements: Iterable[Placement], metas: Iterable[TensorMeta | None]) -> list[tuple[str, torch.dtype]]:
    pairs = zip(placements, metas, strict=True)
    return [(p.reduce_op, meta.dtype) for p, meta in pairs if isinstance(p, Partial) and meta is not None]


def _obeys(rule: Factors, option: AxisOption) -> bool:
    return all(option.inputs[i] == option.outputs[o] for i, o in rule.enforce)


def _strategy(call: Call, shape: tuple[int, ...], reductions: tuple[str, ...], packs: Packs = (), on_experts: bool = False) -> OpStrategy:
    offered = _options(call, packs, on_experts)
    options = [o for o in offered.options if _wanted(o, reductions)]
    whole = [o for o in options if all(isinstance(p, Replicate) for p in (*o.inputs, *o.outputs))][:1]
    product = itertools.product(*(options if ranks > 1 else whole for ranks in shape))
    chosen = [c for c in product if _legal(c, shape, offered.conditions) and not _has_conflict(c, offered.conflicts)]
    ins = [_layouts([tuple(o.inputs[tensor] for o in combination) for combination in chosen]) for tensor in range(len(call.operands))]
    outs = [_layouts([tuple(o.outputs[tensor] for o in combination) for combination in chosen]) for tensor in range(len(call.outputs))]
    rows = zip(_rows(ins, len(chosen)), _rows(outs, len(chosen)), strict=True)
    specs = tuple(OpSpec(i, o) for i, o in rows if all(map(reductions_commute, (*i, *o))))
    return OpStrategy(specs, offered.fallback, offered.note)


def _wanted(option: AxisOption, reductions: tuple[str, ...]) -> bool:
    """Whether an option passes only ``reductions`` through; reductions that a sharded factor creates are always offered."""
    passed = (p.reduce_op for p in option.inputs if isinstance(p, Partial))
    return option.factor is not None or all(op in reductions for op in passed)


def _layouts(placements: Iterable[tuple[Placement, ...]]) -> list[Layout]:
    """The placements as layouts; equal ones share one object, since many specs repeat few layouts."""
    known: dict[tuple[Placement, ...], Layout] = {}
    return [known.get(p) or known.setdefault(p, Layout(p)) for p in placements]


def _rows(columns: list[list[Layout]], count: int) -> Iterable[tuple[Layout, ...]]:
    return zip(*columns, strict=True) if columns else itertools.repeat((), count)


def _legal(chosen: tuple[AxisOption, ...], shape: tuple[int, ...], conditions: dict[str, _ShardingCondition]) -> bool:
    if sum(o.once for o in chosen) > 1:
        return False
    for factor in {o.factor for o in chosen if o.factor is not None}:
        condition = conditions[factor]
        if condition.tokens and not _tokens_fit(chosen, shape, condition):
            return False
        if condition.inner or condition.full or condition.even or condition.parts:
            ranks = tuple(n for o, n in zip(chosen, shape, strict=True) if o.factor == factor)
            if condition.parts and len(ranks) > 1:
                return False
            if not all(_meets(size, condition, ranks) for size in condition.parts or (condition.size,)):
                return False
    return True


def _tokens_fit(chosen: tuple[AxisOption, ...], shape: tuple[int, ...], condition: _ShardingCondition) -> bool:
    """Whether the buffers of rows hold all rows: the ranks of axes with uneven tokens have equally many together only if these are the
    innermost axes that shard them."""
    cut = [k for k, o in enumerate(chosen) if o.factor == condition.tokens]
    axes = [k for k, o in enumerate(chosen) if o.factor == NAME]
    ranks = math.prod(shape[k] for k in (*cut, *axes))
    return all(k < axes[0] for k in cut) or known_equal(condition.size % ranks, 0)


def _meets(size: Any, condition: _ShardingCondition, ranks: tuple[int, ...]) -> bool:
    """Whether ``size`` elements can be cut over axes of so many ranks."""
    if condition.even and not known_equal(size % math.prod(ranks), 0):
        return False
    return all(aligned(size, inner, ranks) for inner in condition.inner) and not (condition.full and not _has_no_empty_shard(size, ranks))


def _has_conflict(chosen: tuple[AxisOption, ...], conflicts: frozenset[frozenset[str]]) -> bool:
    pairs = itertools.combinations(chosen, 2) if conflicts else ()
    return any(a.factor and b.factor and frozenset((a.factor, b.factor)) in conflicts for a, b in pairs)


def aligned(size: Any, inner: Any, parts: tuple[int, ...]) -> bool:
    """Whether cutting ``size * inner`` elements gives ``inner`` times the cut of ``size``, on every rank."""
    if known_equal(size % math.prod(parts), 0):
        return True
    if not isinstance(size, int) or not isinstance(inner, int):
        return False
    return _aligned(size, inner, parts)


@lru_cache(maxsize=65536)
def _aligned(size: int, inner: int, parts: tuple[int, ...]) -> bool:
    for indexes in itertools.product(*map(range, parts)):
        offset, length = nested_chunk(size, parts, indexes)
        if length and nested_chunk(size * inner, parts, indexes) != (offset * inner, length * inner):
            return False
        if not length and nested_chunk(size * inner, parts, indexes)[1]:
            return False
    return True


def _has_no_empty_shard(size: Any, parts: tuple[int, ...]) -> bool:
    if not isinstance(size, int):
        return known_equal(size % math.prod(parts), 0)
    return all(nested_chunk(size, parts, i)[1] for i in itertools.product(*map(range, parts)))
