"""The lowest mean cost of any plan over several sizes, by enumeration: each choice is priced at each size and averaged here.

A redistribution takes the path with the lowest mean cost, found by Dijkstra's algorithm over single steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import networkx as nx
from passes.enumeration import Enumeration
from passes.overlap_truth import Truth
from torch import fx

from fxshard.cost import node_time
from fxshard.graph.planning_graph import PlanningGraph, producer
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Step, _graph, step_price
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan

Sizes = Mapping[str, int]


def graph_at(graph: PlanningGraph, sizes: Sizes) -> PlanningGraph:
    """The graph at these sizes, static."""
    assert graph.family is not None
    return replace(graph, module=graph.family.at(sizes), family=None)


@cache
def cheapest_path(
    have: Layout, want: Layout, shapes: tuple[tuple[int, ...], ...], weights: tuple[float, ...], rest: tuple
) -> tuple[Step, ...]:
    """The steps with the lowest mean cost, of all paths."""
    itemsize, mesh, price = rest
    graph = _graph(len(shapes[0]), mesh.shape, ("sum",))
    ways = nx.DiGraph()
    for i, step, j in graph.edges:
        each = [step_price(step, graph.layouts[i], shape, itemsize, mesh, price) for shape in shapes]
        mean = sum(w * p for w, p in zip(weights, each, strict=True)) + 1e-9
        if mean < ways.get_edge_data(i, j, {"mean": float("inf")})["mean"]:
            ways.add_edge(i, j, mean=mean, step=step)
    place = {layout: k for k, layout in enumerate(graph.layouts)}
    nodes = nx.dijkstra_path(ways, place[have], place[want], weight="mean")
    return tuple(ways[a][b]["step"] for a, b in itertools.pairwise(nodes))


@dataclass
class MeanEnumeration(Enumeration):
    """``at``: (weight, sizes) pairs; ``annotated``: the graph at its traced sizes, with the specs that are legal at all of them."""

    at: Sequence[tuple[float, Sizes]] = ()
    samples: list[tuple[float, Annotated]] = field(init=False)

    def __post_init__(self) -> None:
        graph, mesh, specs = self.annotated.graph, self.annotated.mesh, self.annotated.specs
        self.samples = [(weight, replace(annotate(graph_at(graph, sizes), mesh), specs=specs)) for weight, sizes in self.at]
        super().__post_init__()
        for k, node in enumerate(self.nodes):
            self.options[k] = sorted(((spec, self._computed(node.name, spec, mesh)) for spec, _ in self.options[k]), key=lambda o: o[1])
        least = [min((c for _, c in o), default=0.0) for o in self.options]
        self.remaining = [sum(least[k:]) for k in range(len(least) + 1)]
        self.truths = [Truth(one) for _, one in self.samples]

    def _computed(self, node: str, spec: OpSpec, mesh: Mesh) -> float:
        if node not in self.annotated.calls or self.objective != "time":
            return 0.0
        return sum(weight * node_time(one.calls[node], spec, mesh) for weight, one in self.samples)

    def _price(self, operand: fx.Node, want: Layout) -> float:
        source, index = producer(operand)
        have, mesh = self.specs[source.name].outputs[index], self.annotated.mesh
        if have == want:
            return 0.0
        there = [one.graph.by_name[operand.name] for _, one in self.samples]
        shapes, weights = tuple(tuple(v.meta["val"].shape) for v in there), tuple(weight for weight, _ in self.samples)
        itemsize, total = there[0].meta["val"].dtype.itemsize, 0.0
        way = cheapest_path(have, want, shapes, weights, (itemsize, mesh, self.price))
        for weight, shape, value, truth in zip(weights, shapes, there, self.truths, strict=True):
            at, cost = have, 0.0
            for step in way:
                cost += step_price(step, at, shape, itemsize, mesh, self.price)
                at = step.after(at)
            if self.objective == "time":
                cost -= truth.saved(self.specs, value, want) + truth.hidden(self.specs, value, want)
            total += weight * cost
        return total

    def cost_of(self, plan: ShardingPlan) -> float:
        results = plan.specs["output"].inputs
        keep: Callable[[str, OpSpec], bool] = lambda n, s: s == plan.specs[n]  # noqa: E731
        return MeanEnumeration(self.annotated, self.objective, keep, lambda k, x: x == results[k], at=self.at).least(float("inf"))
