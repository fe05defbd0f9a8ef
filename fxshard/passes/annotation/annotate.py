"""annotate: every node of a planning graph gets its OpStrategy, the set of all legal ways to run it on the mesh."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard._torch_compat.sizes.symbols import GuardRefused, is_symbolic, refusing_guards, shape_env_of
from fxshard.errors import RuleError, SizesError
from fxshard.graph.call import Call, calls_of
from fxshard.graph.planning_graph import UNKNOWN, PlanningGraph, operands, outputs_of, plain_shape, planned_nodes, producer, source_line
from fxshard.layout.layouts import Layout, all_layouts, nested_chunk
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.expert_ids import check_expert_ids
from fxshard.passes.annotation.expert_values import expert_nodes
from fxshard.passes.annotation.fusion import Weights, traffic_of
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.overlap import Windows
from fxshard.passes.annotation.packing import packings_of, packs_of
from fxshard.passes.annotation.prices import Prices
from fxshard.passes.trace.named_layouts import PLACED, kept_specs, named_specs
from fxshard.passes.trace.regions import check_collective, region_specs
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.shapes import DynamicDim, GraphFamily, WeightedSizes, depends_on, first_broken, sizes_named
from fxshard.strategies import OpStrategy, call_of, op_strategy
from fxshard.strategies.engine.engine import created_reductions, passed_reductions
from fxshard.strategies.engine.packed import Packs
from fxshard.views.fallbacks import WRITTEN_OUT, Fallbacks


@dataclass(frozen=True)
class Annotated:
    """A planning graph with the legal specs and the calls of its nodes, by name. ``fallbacks``: nodes that are always replicated, with
    reasons.

    ``sizes``: of its dynamic dims, by name. ``samples``: (weight, this graph at other sizes) over which prices are averaged, empty to use
    its own sizes; ``largest``: this graph at the sizes for which memory is counted, None for its own. All have the same specs.
    """

    graph: PlanningGraph
    mesh: Mesh
    specs: Mapping[str, tuple[OpSpec, ...]]
    calls: Mapping[str, Call]
    fallbacks: Fallbacks
    sizes: tuple[tuple[str, int], ...] = ()
    samples: tuple[tuple[float, Annotated], ...] = ()
    largest: Annotated | None = None

    @property
    def at_memory_sizes(self) -> Annotated:
        """The graph at the sizes for which memory is counted; its prices are those of this one."""
        return self.largest or self

    @cached_property
    def prices(self) -> Prices:
        """The prices of its nodes and redistributions."""
        return Prices(self.samples or ((1.0, self),))

    @cached_property
    def windows(self) -> Windows:
        """The compute time that can hide redistributions of its values."""
        return Windows(self.graph, self.mesh, self.specs, self.calls)

    @cached_property
    def times(self) -> Lifetimes:
        """When its values are live."""
        return Lifetimes(self.graph)

    @cached_property
    def plan_entries(self) -> IdentityCache:
        """A cache of the entries and times of earlier plans: most of them are the same in the next plan."""
        return IdentityCache()


def annotate(
    graph: PlanningGraph, mesh: Mesh, sampled: Sequence[WeightedSizes] = (), largest: Mapping[str, int] | None = None
) -> Annotated:
    """The legal specs of all nodes: placeholders may be replicated or sharded, calls follow their rules.

    For a graph with dynamic dims, only specs that are legal at other sizes too: those that fit the example by chance are dropped.
    ``sampled``: the sizes over which prices are averaged, by default the graph's own; ``largest``: the sizes for which memory is counted.
    Specs are legal at all of these. Raises SizesError for sizes that violate the trace's guards, TraceError if rows of experts that were
    sent with different ids meet.
    """
    found = _annotated(graph, mesh, graph.family)
    check_expert_ids(graph, found.specs, found.calls)
    if graph.family is None:
        return found
    family, example = graph.family, tuple(graph.family.example.items())
    uneven = {family.symbols[dim.name] for dim in family.dims if dim.uneven}
    enlarged = _enlarged(family.example, family, mesh) if uneven else family.example  # an example of one element shards as larger ones do
    specs = dict(found.specs if enlarged == family.example else at_sizes(graph, mesh, enlarged).specs)
    for sizes in probes(family, mesh):
        _keep_legal(specs, at_sizes(graph, mesh, sizes).specs)
    samples = [(one.weight, found if one.sizes == example else _served_at(graph, mesh, dict(one.sizes))) for one in sampled]
    most = None if largest is None or tuple(largest.items()) == example else at_sizes(graph, mesh, largest)
    for other in (*(one for _, one in samples), *((most,) if most else ())):
        _keep_legal(specs, other.specs)
    kept = _at_all_sizes(specs, graph, family, mesh, uneven) if uneven else specs
    _check_some_left(kept, found)
    own = replace(found, specs=kept, sizes=example)
    priced = tuple((weight, own if one is found else replace(one, specs=kept)) for weight, one in samples)
    counted = None if most is None else replace(most, specs=kept, samples=priced or ((1.0, own),))
    return replace(own, samples=priced, largest=counted)


def at_sizes(graph: PlanningGraph, mesh: Mesh, sizes: Mapping[str, int]) -> Annotated:
    """The graph at other sizes of its dynamic dims, by name, with the specs that are legal there."""
    assert graph.family is not None
    sizes = graph.family.with_derived(sizes)
    found = _annotated(replace(graph, module=graph.family.at(sizes), family=None), mesh, graph.family)
    return replace(found, sizes=tuple((dim.name, sizes[dim.name]) for dim in graph.family.dims))


def _served_at(graph: PlanningGraph, mesh: Mesh, sizes: Mapping[str, int]) -> Annotated:
    assert graph.family is not None
    guard = first_broken(graph.family.guards, graph.family.with_derived(sizes))
    if guard is not None:
        what = f"a plan for the example is not valid for {sizes_named(sizes)}: the model takes for granted that {guard}"
        raise SizesError(what, where="example_sizes", remedy="leave these sizes out; they get a plan of their own")
    return at_sizes(graph, mesh, sizes)


def _keep_legal(specs: dict[str, tuple[OpSpec, ...]], others: Mapping[str, tuple[OpSpec, ...]]) -> None:
    """Removes from ``specs`` what is not in ``others``. Equal calls share one tuple of specs, before and after."""
    known: dict[tuple[int, int], tuple[tuple[OpSpec, ...], ...]] = {}
    for name in specs.keys() & others.keys():
        mine, theirs = specs[name], others[name]
        if (id(mine), id(theirs)) not in known:
            legal = set(theirs)
            known[id(mine), id(theirs)] = mine, theirs, tuple(spec for spec in mine if spec in legal)
        specs[name] = known[id(mine), id(theirs)][-1]


def _check_some_left(kept: Mapping[str, tuple[OpSpec, ...]], found: Annotated) -> None:
    """Raises SizesError for a node that no spec serves at all sizes, such as the end of a local region along a dim that may be uneven."""
    for name, specs in found.specs.items():
        if specs and not kept[name]:
            node = found.graph.by_name[name]
            layouts = ", ".join(map(str, specs[0].inputs or specs[0].outputs))
            what = f"{node.target} is only possible in {layouts}, and not so at all sizes"
            raise SizesError(
                what, where=source_line(node) or f"node {name}", remedy="let the mesh divide these sizes, or leave them static"
            )


def _at_all_sizes(
    specs: Mapping[str, tuple[OpSpec, ...]], graph: PlanningGraph, family: GraphFamily, mesh: Mesh, uneven: Collection[sympy.Symbol]
) -> dict[str, tuple[OpSpec, ...]]:
    """The specs that are legal for all values of the symbols ``uneven``: those that the rule allows for symbolic sizes, if it can be
    evaluated without concrete values; otherwise, and in local regions, those that shard no dim whose size depends on such a symbol."""
    found, local = dict(specs), region_specs(graph, mesh)
    for node in family.module.graph.nodes:
        if node.op != "call_function" or node.name not in found:
            continue
        ins, outs = ([_uneven_dims(value, uneven) for value in values] for values in (_values(node), outputs_of(node)))
        if not any((*ins, *outs)):
            continue
        packs = packs_of(graph.by_name[node.name], packings_of(graph))
        legal = None if node.name in local else _legal_for_symbols(node, mesh, packs)
        found[node.name] = tuple(
            s for s in specs[node.name] if (s in legal if legal is not None else not (_cuts(s.inputs, ins) or _cuts(s.outputs, outs)))
        )
    return found


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [operand.meta["val"] for operand in operands(node)]


def _legal_for_symbols(node: fx.Node, mesh: Mesh, packs: Packs) -> frozenset[OpSpec] | None:
    """The specs that the rule allows for symbolic sizes; None if it needs concrete values."""
    env = next((env for v in (*_values(node), *outputs_of(node)) if v is not None and (env := shape_env_of(v)) is not None), None)
    if env is None:
        return None
    try:
        with refusing_guards(env):
            return frozenset(op_strategy(call_of(node), mesh, packs=packs).specs)
    except (GuardRefused, TypeError, ValueError, RuleError):  # the rule needs numbers
        return None


def _uneven_dims(value: torch.Tensor | None, symbols: Collection[sympy.Symbol]) -> list[int]:
    return [] if value is None else [d for d, size in enumerate(value.shape) if depends_on(size, symbols)]


def _cuts(layouts: Sequence[Layout], dims: Sequence[Sequence[int]]) -> bool:
    return any(layout.axes_on(d) for layout, some in zip(layouts, dims, strict=True) for d in some)


PROBES, MIN_PROBES = 3, 2
"""Number of other sizes at which a spec must be legal, and the minimum if a range is narrow."""
MAX_DRAWS = 2000
"""Number of random draws to find them."""


def probes(family: GraphFamily, mesh: Mesh) -> list[dict[str, int]]:
    """Sizes at which to test specs. They satisfy the trace's guards, differ from the example in each dim, and are distinct among dims. They
    are multiples of the mesh's size; for uneven dims, no axis divides them, and unless the range is narrow, no shard is empty. Derived dims
    follow from the others.

    Raises SizesError for fewer than ``MIN_PROBES``: a spec that is legal in general could not be told from one that fits by chance.
    """
    found: list[dict[str, int]] = []
    choices = {dim.name: _sizes_of(dim, mesh) for dim in family.dims if dim.name not in family.derived}
    draw = random.Random(0)
    for _ in range(MAX_DRAWS if all(choices.values()) else 0):
        free = {name: draw.choice(some) for name, some in choices.items()}
        sizes = family.with_derived(free)
        good = all(dim.allows(sizes[dim.name]) for dim in family.dims) and first_broken(family.guards, sizes) is None
        if sizes not in found and len(set(free.values())) == len(free) and good:
            found.append(sizes)
            if len(found) == PROBES:
                break
    if len(found) >= MIN_PROBES:
        return found
    names = ", ".join(dim.name for dim in family.dims)
    raise SizesError(
        f"cannot find {MIN_PROBES} sizes of {names} besides the example's, to test which specs are legal at all sizes",
        remedy="give dims that always have the same size one name, give the others a wider range (torch.export.Dim), or leave them static",
    )


def _sizes_of(dim: DynamicDim, mesh: Mesh) -> list[int]:
    """Sizes to draw from. Small ones suffice, because rules depend only on how a size is divided."""
    count = math.prod(mesh.shape)
    most = max(40 * count, count * count + 60)
    most = most if dim.most is None else min(dim.most, most)
    if not dim.uneven:
        return [size for size in range(count, most + 1, count) if size >= dim.least and size != dim.example]
    last = tuple(n - 1 for n in mesh.shape)
    sizes = [s for s in range(dim.least, most + 1) if s != dim.example and nested_chunk(s, mesh.shape, last)[1]]
    odd = [s for s in sizes if all(s % n for n in mesh.shape if n > 1)]
    if len(odd) >= MIN_PROBES:
        return odd
    narrow = [s for s in range(dim.least, most + 1) if s != dim.example and all(s % n for n in mesh.shape if n > 1)]
    some = (odd, [s for s in narrow if s >= count], narrow, sizes)
    return next((found for found in some if len(found) >= MIN_PROBES), odd or sizes)


def illegal_node_at(graph: PlanningGraph, plan: ShardingPlan, sizes: Mapping[str, int]) -> str | None:
    """The first node of ``plan`` whose spec is not legal at ``sizes``, None if all are; used for sizes that shard unevenly."""
    return None if _always_legal(graph, plan) else first_illegal(plan, specs_for_remainders(graph, plan.mesh, sizes))


def _always_legal(graph: PlanningGraph, plan: ShardingPlan) -> bool:
    """Whether all specs of the plan are legal at all sizes; in a plan that the user wrote, some may not be. Cached per plan."""
    known = graph.cache.setdefault("always legal", {})
    if id(plan) not in known:
        assert graph.family is not None
        any_size = all(dim.uneven for dim in graph.family.dims)
        known[id(plan)] = plan, any_size and first_illegal(plan, annotate(graph, plan.mesh).specs) is None
    found: bool = known[id(plan)][1]
    return found


def specs_for_remainders(graph: PlanningGraph, mesh: Mesh, sizes: Mapping[str, int]) -> Mapping[str, tuple[OpSpec, ...]]:
    """The specs that are legal for ``sizes`` of a graph's dynamic dims, as far as legality depends on how the mesh divides them.

    Lowering handles shards of no or one element, so they make no spec illegal: larger sizes with the same remainders are tested instead.
    """
    assert graph.family is not None
    return at_sizes(graph, mesh, _enlarged(sizes, graph.family, mesh)).specs


def first_illegal(plan: ShardingPlan, specs: Mapping[str, tuple[OpSpec, ...]]) -> str | None:
    """The first node whose spec in ``plan`` is not among its ``specs``, None if all are."""
    known = ((name, legal) for name, legal in specs.items() if name in plan.specs and name != "output")
    return next((name for name, legal in known if plan.specs[name] not in set(legal)), None)


def _enlarged(sizes: Mapping[str, int], family: GraphFamily, mesh: Mesh) -> dict[str, int]:
    """Sizes with the same remainders that leave each rank at least two elements; ``sizes`` itself if a guard does not hold for them."""
    count = math.prod(mesh.shape)
    larger = {name: size + count * max(0, -(-(2 * count - size) // count)) for name, size in sizes.items()}
    return dict(sizes) if first_broken(family.guards, family.with_derived(larger)) else larger


def _annotated(graph: PlanningGraph, mesh: Mesh, family: GraphFamily | None) -> Annotated:
    calls = _calls(graph, () if family is None else _with_symbols(family))
    late = graph.run_time_causes
    reductions = pending_reductions(graph, {name: call for name, call in calls.items() if name not in late})
    specs: dict[str, tuple[OpSpec, ...]] = {}
    fallbacks = []
    local = region_specs(graph, mesh)
    packable, travelling = packings_of(graph), expert_nodes(graph, calls)
    inputs: dict[Any, tuple[OpSpec, ...]] = {}
    for node in planned_nodes(graph):
        if node.name in local:
            specs[node.name] = (local[node.name],)
        elif node.op == "placeholder":
            packed = tuple(PackedShard(d, parts) for d, parts in sorted(packable.get((node.name, 0), {}).items()) if min(parts) > 1)
            key = plain_shape(node.meta["val"].shape), packed
            if key not in inputs:
                inputs[key] = tuple(OpSpec((), (layout,)) for layout in input_layouts(node, mesh, packed=packed))
            specs[node.name] = inputs[key]
        elif node.op == "call_function":
            check_collective(node)
            call = calls[node.name]
            if node.name in late:
                strategy = _replicated(call, mesh, late[node.name])
            else:
                strategy = op_strategy(call, mesh, reductions[node.name], packs_of(node, packable), node.name in travelling)
            specs[node.name] = (named_specs if node.target is PLACED else kept_specs)(node, mesh, strategy.specs)
            if strategy.fallback and calls[node.name].outputs:
                fallbacks.append((node.name, strategy.reason))
            if call.op == "fxshard.dropout.default" and call.arg(4, "inside", ""):
                kernels = "its kernels draw by position in the shard, so it runs as scores, softmax, dropout and a product"
                fallbacks.append((node.name, f"{WRITTEN_OUT} {call.arg(4)} with dropout; {kernels}"))
    return Annotated(graph, mesh, specs, _priced(graph, calls, mesh), tuple(fallbacks))


def _calls(graph: PlanningGraph, of_any_size: Collection[str]) -> dict[str, Call]:
    """The calls of a graph; equal calls are one object, so that later look-ups need not compare them. ``of_any_size``: the nodes with a
    dynamic size."""
    known: dict[Call, Call] = {}
    found = {name: replace(call, any_size=True) if name in of_any_size else call for name, call in calls_of(graph).items()}
    return {name: known.setdefault(call, call) if call.is_hashable else call for name, call in found.items()}


def _priced(graph: PlanningGraph, calls: Mapping[str, Call], mesh: Mesh) -> Mapping[str, Call]:
    """The calls with the traffic that fusion leaves, on hardware whose architecture is known."""
    if mesh.hardware.reached is None:
        return calls
    known: dict[tuple[int, Weights], Call] = {}
    traffic = traffic_of(graph)
    return {
        name: known.setdefault((id(call), traffic[name]), replace(call, traffic=traffic[name])) if name in traffic else call
        for name, call in calls.items()
    }


def _with_symbols(family: GraphFamily) -> frozenset[str]:
    """The nodes that read a tensor with a symbolic size."""
    calls = (n for n in family.module.graph.nodes if n.op == "call_function")
    return frozenset(n.name for n in calls if any(is_symbolic(size) for value in _values(n) for size in value.shape))


def pending_reductions(graph: PlanningGraph, calls: Mapping[str, Call]) -> dict[str, frozenset[str]]:
    """For each call, the reductions that may be pending in an operand: sums, and those that earlier operators create or pass on."""
    arriving: dict[str, frozenset[str]] = {}
    leaving: dict[str, frozenset[str]] = {}
    known: dict[Call, tuple[frozenset[str], frozenset[tuple[str, str]]]] = {}
    left: dict[tuple[int, frozenset[str]], tuple[frozenset[str], frozenset[str]]] = {}
    for node in planned_nodes(graph):
        call = calls.get(node.name)
        if call is None:
            continue
        if call not in known:
            known[call] = created_reductions(call), passed_reductions(call)
        created, passed = known[call]
        arrive = frozenset({"sum"}.union(*(leaving.get(producer(o)[0].name, ()) for o in operands(node))))
        key = id(call), arrive
        if key not in left:  # layers repeat
            left[key] = arrive, created | {after for before, after in passed if before in arrive}
        arriving[node.name], leaving[node.name] = left[key]
    return arriving


def _replicated(call: Call, mesh: Mesh, reason: str) -> OpStrategy:
    whole = Layout.replicated(mesh.ndim)
    spec = OpSpec((whole,) * len(call.operands), (whole,) * len(call.outputs))
    return OpStrategy((spec,), True, reason)


def input_layouts(node: fx.Node, mesh: Mesh, *, packed: Sequence[PackedShard] = ()) -> list[Layout]:
    """All canonical layouts of a placeholder without Partial; tensors of unknown size stay whole. ``packed``: ways to pack dims."""
    shape = plain_shape(node.meta["val"].shape)
    if UNKNOWN in shape:
        return [Layout.replicated(mesh.ndim)]
    return all_layouts(len(shape), mesh.shape, reduce_ops=(), packed=packed)


def cuts_one_element(layout: Layout, node: fx.Node, *, batch: bool) -> bool:
    """Whether a layout shards a dim of one element, which saves nothing: a plan does so only if it is told to.

    ``batch``: dim 0 does not count, so that a last batch of one row has the layout of the others.
    """
    return any(size == 1 and not (batch and d == 0) and layout.axes_on(d) for d, size in enumerate(plain_shape(node.meta["val"].shape)))
