"""The predicted time of a training step: the plan with the published layouts pinned, what is recomputed, and the optimiser's step.

Plans are made for ``FEW`` and ``MORE`` layers and extrapolated to the published number, because equal layers cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

import fxshard
from bench.published.layouts import pins_of
from bench.published.models import MODELS, built
from bench.published.rows import Step, hardware_of
from fxshard.cost import collective_time, optimizer_time
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.redistribution import sent_bytes, walk
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import PlannedNode, Redistribution

FEW, MORE = 2, 4
ATTENTION = ("fxshard.sdpa.default", "fxshard.sdpa_backward.default")
PRODUCT = "fxshard.einsum.default"


@dataclass(frozen=True)
class StepTime:
    """Parts of a step, in microseconds; ``exposed``: communication that nothing hides; ``again``: of products, in ``recomputed``."""

    products: float
    attention: float
    others: float
    exposed: float
    recomputed: float
    optimizer: float
    again: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self) if part.name != "again")

    def sustained(self, times: float) -> float:
        """The total if products sustain ``times`` their rate."""
        return self.total - (self.products + self.again) * (1 - 1 / times)


def predicted(step: Step) -> StepTime:
    few, more = (_planned(step, layers) for layers in (FEW, MORE))
    times = (MODELS[step.model].layers - FEW) / (MORE - FEW)
    parts = {part.name: (getattr(few, part.name), getattr(more, part.name)) for part in fields(StepTime)}
    return StepTime(**{name: a + times * (b - a) for name, (a, b) in parts.items()})


def _planned(step: Step, layers: int) -> StepTime:
    mesh = parse_mesh(step.mesh, hardware_of(step.device))
    with torch.device("meta"):
        tokens = torch.empty(step.sequences * mesh.shape[0], step.length, dtype=torch.int64)
    mixed = fxshard.MixedPrecision(torch.bfloat16, MODELS[step.model].reduces)
    graph = trace(built(step.model, layers), (tokens, tokens), mixed_precision=mixed)
    inputs, pins = pins_of(step.layout, graph, step.model)
    request = Request(input_layouts=inputs, output_layouts="R" * mesh.ndim, pins=pins, cache=False)
    return _parts(plan_graph(graph, mesh, request), graph, layers, step)


def _parts(plan: fxshard.ShardingPlan, graph: PlanningGraph, layers: int, step: Step) -> StepTime:
    selective = step.recomputation.startswith("selective")
    again, anew = (_recomputed(plan), sum(_products_anew(plan))) if selective else (0.0, 0.0)
    products = sum(n.compute for n in plan.nodes if n.op == PRODUCT)
    attention = sum(n.compute for n in plan.nodes if n.op in ATTENTION)
    others = sum(n.compute for n in plan.nodes) - products - attention
    weights = [e for e in plan.redistributions if _is_of_weights(e, graph)]
    rest = sum(e.cost for e in plan.redistributions) - sum(e.cost for e in weights)
    forward = sum(n.compute for n in _forward(plan)) + rest / 2
    backward = products + attention + others + rest + again - forward
    exposed = rest + _exposed(weights, plan.mesh, layers + 2, forward, backward)
    return StepTime(products, attention, others, exposed, again, optimizer_time(plan, "adamw"), anew)


def _exposed(weights: Sequence[Redistribution], mesh: fxshard.Mesh, buckets: int, forward: float, backward: float) -> float:
    """What of gathers and reductions of weights the device waits for. As FSDP does, a layer's are one collective (embedding and head
    count as a layer each), and parameters are gathered again in the backward. The rest of a half hides them, at the price of the overlap;
    nothing hides the first gather and the last reduction."""
    gathers, reductions = (_bucketed(weights, mesh, buckets, kinds) for kinds in (("all_gather",), ("reduce_scatter", "all_reduce")))
    share, alone = mesh.hardware.overlap, (gathers + reductions) / buckets
    return alone + sum(time - share * min(time, window) for time, window in ((gathers, forward), (gathers + reductions, backward)))


def _bucketed(weights: Sequence[Redistribution], mesh: fxshard.Mesh, buckets: int, kinds: tuple[str, ...]) -> float:
    sent: dict[tuple[str, int], int] = {}
    for entry in weights:
        for layout, one, _ in walk(entry.source, entry.steps):
            if one.kind in kinds:
                key = one.kind, one.axis
                sent[key] = sent.get(key, 0) + sent_bytes(one, layout, entry.shape, entry.itemsize, mesh)
    return sum(buckets * collective_time(kind, axis, size // buckets, mesh) for (kind, axis), size in sent.items())


def _is_of_weights(entry: Redistribution, graph: PlanningGraph) -> bool:
    """Whether it moves a parameter, or a gradient of one."""
    node = graph.by_name[entry.value]
    made = node
    while made.op == "call_function" and len(made.all_input_nodes) == 1:
        made = made.all_input_nodes[0]
    parameters = {end.node for end in graph.inputs_of("parameter")}
    return (
        made.name in parameters
        or {user.op for user in node.users} == {"output"}
        or all({u.op for u in user.users} == {"output"} and len(user.all_input_nodes) == 1 for user in node.users)
    )


def _forward(plan: fxshard.ShardingPlan) -> Sequence[PlannedNode]:
    """The nodes up to the loss."""
    return plan.nodes[: next(i for i, n in enumerate(plan.nodes) if n.op == "aten.amax.default")]


def _recomputed(plan: fxshard.ShardingPlan) -> float:
    """What torchtitan's selective recomputation repeats of the layers: every second product, and all that is neither product nor attention;
    gathers of activations too. Embedding, last norm, head and loss are not in a layer and cancel out between two numbers of layers."""
    forward = _forward(plan)
    names = {n.name for n in forward}
    pointwise = sum(n.compute for n in forward if n.op != PRODUCT and n.op not in ATTENTION)
    kinds = plan.kinds
    gathers = (
        e.cost
        for e in plan.redistributions
        if e.value in names
        and e.value not in kinds
        and any(s.kind == "all_gather" for s in e.steps)
        and any(r in names for r, _ in e.readers)
    )
    return sum(_products_anew(plan)) + pointwise + sum(gathers)


def _products_anew(plan: fxshard.ShardingPlan) -> Sequence[float]:
    """Every second product of the layers, whose last is the head."""
    return [n.compute for n in _forward(plan) if n.op == PRODUCT][:-1][1::2]
