"""verify: a plan is legal for its graph - specs that the rules offer, layouts that meet on each edge, nothing left pending."""

from __future__ import annotations

from torch import fx

from fxshard.errors import PlanError
from fxshard.passes.annotate import Annotated
from fxshard.planning_graph import operands, planned_nodes, producer, source_line
from fxshard.redistribution import walk
from fxshard.sharding_plan import ShardingPlan


def verify_plan(annotated: Annotated, plan: ShardingPlan) -> None:
    """Raises PlanError naming the first node or edge that is not legal."""
    moves = {(m.value, m.target): m for m in plan.redistributions}
    for node in planned_nodes(annotated.graph):
        spec = plan.specs.get(node.name)
        if spec is None:
            raise PlanError(f"the plan leaves out {node.name}", where=source_line(node), remedy="plan again")
        if node.op == "call_function" and spec not in annotated.specs[node.name]:
            raise PlanError(f"{node.name} ({node.target}) cannot run as {spec}", where=source_line(node), remedy="choose one of its OpSpecs")
        for operand, want in zip(operands(node), spec.inputs, strict=True):
            source, index = producer(operand)
            have = plan.specs[source.name].outputs[index]
            if want != have:
                _check_move(node, operand, moves.get((operand.name, want)), have)
    _check_results(annotated, plan)


def _check_move(reader: fx.Node, operand: fx.Node, move: object, have: object) -> None:
    from fxshard.sharding_plan import Redistribution

    if not isinstance(move, Redistribution) or move.source != have:
        raise PlanError(f"nothing brings {operand.name} from {have} to what {reader.name} reads", where=source_line(operand), remedy="plan again")
    layout = move.source
    for layout, step, _ in walk(move.source, move.steps):
        if layout[step.axis] != step.source:
            raise PlanError(f"the redistribution of {operand.name} has a step {step} that does not start at {layout}", remedy="plan again")
    end = layout if not move.steps else layout.with_axis(move.steps[-1].axis, move.steps[-1].target)
    if end != move.target:
        raise PlanError(f"the redistribution of {operand.name} ends at {end}, not at {move.target}", remedy="plan again")


def _check_results(annotated: Annotated, plan: ShardingPlan) -> None:
    """No result is pending; gradients and mutated buffers lie as their inputs do."""
    layouts = {end.name: plan.specs[end.node].outputs[0] for end in plan.inputs if end.kind in ("parameter", "buffer", "input")}
    for end, layout in zip(annotated.graph.outputs, plan.specs["output"].inputs, strict=True):
        if layout.has_partial:
            raise PlanError(f"{end.kind} {end.name} is left pending ({layout})", remedy="outputs can be replicated or sharded")
        if end.kind != "output" and layout != layouts[end.name]:
            raise PlanError(f"the {end.kind} of {end.name} lies as {layout}, not as {layouts[end.name]}", remedy="plan again")
