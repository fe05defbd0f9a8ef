"""verify: checks that a traced graph has the inputs and outputs it lists, and that a plan is legal for it: each spec is offered by the
node's rule, and layouts match on each edge."""

from __future__ import annotations

import re
import weakref
from collections.abc import Hashable, Mapping, Sequence, Set

from torch import fx

from fxshard.errors import PlanError, TraceError, closest
from fxshard.graph.planning_graph import PlanningGraph, operands, outputs_of, plain_shape, planned_nodes, producer, source_line
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout, same_layout, sharded_dim
from fxshard.layout.redistribution import is_legal, walk
from fxshard.passes.annotation.annotate import Annotated
from fxshard.plans.plan_data import OpSpec, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.views.fallbacks import NO_RULE


def verify_graph(graph: PlanningGraph) -> None:
    """Raises TraceError unless nodes carry fake CPU tensors and the graph has the inputs and outputs that its lists name."""
    graph.module.graph.lint()
    remedy = "this is a fault of the trace pass; please report it"
    placeholders = [n.name for n in graph.nodes if n.op == "placeholder"]
    if placeholders != [i.node for i in graph.inputs]:
        raise TraceError(f"the graph's inputs are {placeholders}, not {[i.node for i in graph.inputs]}", remedy=remedy)
    if len(operands(graph.module.graph.output_node())) != len(graph.outputs):
        raise TraceError(f"the number of the graph's results is not that of its outputs {[o.name for o in graph.outputs]}", remedy=remedy)
    known = {i.name for i in graph.inputs}
    tangents = {o.tangent for o in graph.outputs}
    lost = [i.name for i in graph.inputs_of("tangent") if i.name not in tangents]
    lost += [o.name for o in graph.outputs if o.kind != "output" and o.name not in known]
    if lost:
        raise TraceError(f"nothing in the graph belongs to {lost[0]}", remedy=remedy)
    for node in planned_nodes(graph):
        for value in outputs_of(node) if node.op != "output" else ():
            if value is not None and value.device.type != "cpu":
                raise TraceError(f"{node.name} is planned on {value.device}", where=_where(node), remedy=remedy)


def verify_plan(annotated: Annotated, plan: ShardingPlan) -> None:
    """Raises PlanError naming the first node or edge that is not legal."""
    verify_edges(annotated.graph, plan)
    verify_specs(annotated, plan)


def verify_specs(annotated: Annotated, plan: ShardingPlan) -> None:
    """Raises PlanError unless the rules offer each node's spec."""
    fallbacks = dict(annotated.fallbacks)
    for node in planned_nodes(annotated.graph):
        spec = plan.specs[node.name]
        legal = annotated.specs[node.name] if node.op != "output" else ()
        if node.op != "output" and not any(s is spec for s in legal) and spec.canonical(plan.mesh.shape) not in legal:
            remedy = "choose one of its OpSpecs; fxshard.plan(pins=...) fills in the rest"
            reason = fallbacks.get(node.name, "")
            if reason.startswith(NO_RULE):
                remedy = "it has no rule here: register the one that the plan was made with (fxshard.register_rule), or plan again"
            elif reason:
                remedy = f"leave it replicated: {reason}"
            raise PlanError(f"{node.name} ({node.target}) cannot run as {spec}", where=_where(node), remedy=remedy)


def verify_blocks(graph: PlanningGraph, plan: ShardingPlan) -> None:
    """Raises PlanError unless all blocks that the plan recomputes exist in the model."""
    for block in plan.recomputed:
        if (name := re.sub(r" \(call \d+\)$", "", block)) not in graph.returned:
            what = f"the plan computes {block!r} again, which is no block of this model{closest(name, graph.returned)}"
            raise PlanError(what, where=f"recomputed, plan on mesh {plan.mesh}", remedy="correct the name in its file, or plan again")


def verify_edges(graph: PlanningGraph, plan: ShardingPlan, *, deferred: bool = False) -> None:
    """Raises PlanError for a plan whose nodes are not the graph's, or with a spec of the wrong form, layouts that differ on an edge, or a
    result in a layout that cannot be returned. Rules are not consulted. ``deferred``: gradients may be pending sums. Graph and plan are
    immutable, so each plan is checked once."""
    known = graph.cache.get("whole edges")
    if known is not None and known[0]() is plan and known[1] == deferred:
        return
    planned = {n.name: n for n in plan.nodes}
    moves: dict[tuple[str, int], list[Redistribution]] = {}
    kept: dict[str, set[Layout]] = {}
    for move in plan.redistributions:
        for reader in move.readers:
            moves.setdefault(reader, []).append(move)
        if move.source == _source_layout(graph, plan, move):
            kept.setdefault(move.value, set()).add(move.target)
    served: dict[tuple[str, int], tuple[str, Layout]] = {}
    passed: set[Hashable] = set()
    for node in planned_nodes(graph):
        spec = plan.specs.get(node.name)
        if spec is None:
            raise PlanError(f"the plan leaves out {node.name}", where=_where(node), remedy="plan again")
        _check_identity(node, planned.pop(node.name), plan)
        reads = operands(node)
        _check_form(node, spec, plan, reads, passed)
        for k, (operand, want) in enumerate(zip(reads, spec.inputs, strict=True)):
            source, index = producer(operand)
            have = plan.specs[source.name].outputs[index]
            if want != have or (node.name, k) in moves:
                _check_move(node, operand, moves.get((node.name, k), ()), {have, *kept.get(operand.name, ())}, want, plan.mesh.shape)
                served[node.name, k] = operand.name, want
    if planned:
        raise PlanError(
            f"the plan names {next(iter(planned))}, which the graph lacks", where=f"plan on mesh {plan.mesh}", remedy="plan again"
        )
    _check_readers(graph, plan, served)
    _check_results(graph, plan, deferred)
    graph.cache["whole edges"] = weakref.ref(plan), deferred


def _check_readers(graph: PlanningGraph, plan: ShardingPlan, served: Mapping[tuple[str, int], tuple[str, Layout]]) -> None:
    """Raises PlanError unless each redistribution has users that read its target layout, and each of them has only this one."""
    seen = set()
    for move in plan.redistributions:
        if move.value not in graph.by_name:
            raise PlanError(f"the plan moves {move.value}, which the graph lacks", where=f"node {move.value}", remedy="plan again")
        where = _where(graph.by_name[move.value])
        if not move.readers or move.ahead:  # the others were checked with their readers
            _check_steps(move, graph.by_name[move.value], {_source_layout(graph, plan, move)}, plan.mesh.shape)
        wrong = [reader for reader in move.readers if served.get(reader) != (move.value, move.target)]
        if wrong or not (move.readers or any(other.value == move.value and other.source == move.target for other in plan.redistributions)):
            nobody = "which nobody reads" if len(wrong) == len(move.readers) else f"operand {wrong[0][1]} of {wrong[0][0]} does not read it"
            raise PlanError(f"the plan brings {move.value} to {move.target}, {nobody}", where=where, remedy="plan again")
        for reader in move.readers:
            if reader in seen:
                raise PlanError(f"the plan brings {move.value} to {move.target} twice for {reader[0]}", where=where, remedy="plan again")
            seen.add(reader)


def _source_layout(graph: PlanningGraph, plan: ShardingPlan, move: Redistribution) -> Layout | None:
    """The layout in which the redistributed value is produced; None if the plan does not say."""
    node = graph.by_name.get(move.value)
    if node is None or producer(node)[0].name not in plan.specs:
        return None
    source, index = producer(node)
    outputs = plan.specs[source.name].outputs
    return outputs[index] if index < len(outputs) else None


def _where(node: fx.Node) -> str:
    return source_line(node) or f"node {node.name}"


def _check_identity(node: fx.Node, planned: PlannedNode, plan: ShardingPlan) -> None:
    """Raises PlanError unless ``planned`` describes this node; fields that a partial plan leaves out are not compared."""
    values = [v for v in outputs_of(node) if v is not None] if node.op != "output" else []
    facts = {
        "operator": (planned.op, name_of(node.target) if node.op == "call_function" else node.op),
        "shapes": (planned.shapes, tuple(plain_shape(v.shape) for v in values)),
        "dtypes": (planned.dtypes, tuple(str(v.dtype).removeprefix("torch.") for v in values)),
    }
    for fact, (said, true) in facts.items():
        if said != true and (said or not plan.partial):
            remedy = "plan again; the names, operators and shapes of a plan are those of its model"
            raise PlanError(f"the plan gives {node.name} the {fact} {said!r}, the model {true!r}", where=_where(node), remedy=remedy)


def _check_form(node: fx.Node, spec: OpSpec, plan: ShardingPlan, reads: Sequence[fx.Node], passed: set[Hashable]) -> None:
    """Raises PlanError unless ``spec`` fits the node's operands, outputs and the mesh. ``passed``: (id of the spec, numbers of dims) that
    passed before."""
    gives = outputs_of(node) if node.op != "output" else ()
    form = id(spec), *(o.meta["val"].dim() for o in reads), None, *(None if v is None else v.dim() for v in gives)
    if form in passed:
        return
    passed.add(form)
    if len(spec.inputs) != len(reads) or len(spec.outputs) != len(gives):
        raise PlanError(
            f"the plan's spec {spec} of {node.name} is not for {len(reads)} operands and {len(gives)} outputs",
            where=_where(node),
            remedy="plan again",
        )
    tensors = [*((o.meta["val"], layout) for o, layout in zip(reads, spec.inputs, strict=True)), *zip(gives, spec.outputs, strict=True)]
    for value, layout in tensors:
        if value is not None and (
            len(layout) != plan.mesh.ndim or any(d is not None and not 0 <= d < value.dim() for d in map(sharded_dim, layout))
        ):
            what = f"layout {layout} at {node.name} is not for {value.dim()} dims and mesh {plan.mesh}"
            raise PlanError(what, where=_where(node), remedy="plan again")


def _check_move(
    reader: fx.Node, operand: fx.Node, moves: Sequence[Redistribution], given: Set[Layout], want: Layout, mesh_shape: Sequence[int]
) -> None:
    """Raises PlanError unless one of ``moves`` brings the operand to ``want``. ``given``: the layouts in which it is available."""
    where = _where(operand)
    move = next((m for m in moves if m.value == operand.name and m.source in given and m.target == want), None)
    if move is None:
        have = " or ".join(sorted(map(str, given)))
        raise PlanError(f"nothing brings {operand.name} from {have} to {want}, which {reader.name} reads", where=where, remedy="plan again")
    _check_steps(move, operand, given, mesh_shape)


def _check_steps(move: Redistribution, value: fx.Node, given: Set[Layout | None], mesh_shape: Sequence[int]) -> None:
    """Raises PlanError unless a redistribution is for this tensor, starts at an available layout and reaches its target by legal steps."""
    where, tensor = _where(value), value.meta["val"]
    if move.shape != plain_shape(tensor.shape) or move.itemsize != tensor.dtype.itemsize:
        raise PlanError(f"the redistribution of {value.name} is for another tensor ({move.shape})", where=where, remedy="plan again")
    if move.source not in given:
        raise PlanError(
            f"the redistribution of {value.name} starts at {move.source}, which nothing gives", where=where, remedy="plan again"
        )
    end = move.source
    for layout, step, after in walk(move.source, move.steps):
        if not is_legal(step, layout):
            what = f"the redistribution of {value.name} takes a step {step} from {layout}"
            raise PlanError(what, where=where, remedy="plan again")
        end = after
    if not same_layout(end, move.target, mesh_shape):
        raise PlanError(f"the redistribution of {value.name} ends at {end}, not at {move.target}", where=where, remedy="plan again")


def _check_results(graph: PlanningGraph, plan: ShardingPlan, deferred: bool) -> None:
    """Raises PlanError for a pending result, a gradient or mutated buffer laid out unlike its input, or a tangent unlike its output.

    Those of the model's arguments may be whole instead.
    """
    arguments = {end.name for end in graph.inputs_of("input")}
    layouts = {end.name: plan.specs[end.node].outputs[0] for end in graph.inputs}
    output = graph.module.graph.output_node()
    for end, node, layout in zip(graph.outputs, operands(output), plan.specs["output"].inputs, strict=True):
        if deferred and end.kind == "gradient" and layout.has_partial:
            continue
        if layout.has_partial:
            remedy = "outputs can be replicated or sharded"
            raise PlanError(f"{end.kind} {end.name} is left pending ({layout})", where=_where(node), remedy=remedy)
        twin = end.tangent or end.name
        if layout.is_replicated and end.name in arguments:
            continue
        if twin in layouts and layout != layouts[twin]:
            what = f"{end.kind} {end.name} has layout {layout}, {'its tangent' if end.kind == 'output' else 'its input'} {layouts[twin]}"
            raise PlanError(what, where=_where(node), remedy="plan again")
