"""What a plan may hold at most at any time, counted time by time over a graph and what its nodes read and give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx
from torch.distributed.tensor import Shard

from fxshard.layout import Layout
from fxshard.mesh import Mesh
from fxshard.planning_graph import PlanningGraph, is_tensor, operands, planned_nodes, producer
from fxshard.sharding_plan import OpSpec

VIEWS = {"aten.t.default", "aten.view.default", "aten.permute.default", "aten.transpose.int", "aten.alias.default", "aten.detach.default"}


def most_held(graph: PlanningGraph, specs: Mapping[str, OpSpec], results: Sequence[Layout], mesh: Mesh) -> int:
    """Bytes: each value as made until its last reader (or a view's) is done, and each other layout that is read from the first
    reader on; inputs (tangents from their first reader) and results to the end; what is only returned exists as made only while it
    is made."""
    nodes = planned_nodes(graph)
    end, when = len(nodes), {n: t for t, n in enumerate(nodes)}
    reads = [(o, n, specs[n.name].inputs[k]) for n in nodes if n.op == "call_function" for k, o in enumerate(operands(n))]
    reads += [(o, nodes[-1], results[k]) for k, o in enumerate(operands(nodes[-1]))]

    def until(value: fx.Node) -> int:
        return max([when[producer(value)[0]] + 1, *(_done(n) for o, n, _ in reads if o is value)])

    def _done(reader: fx.Node) -> int:
        if reader.op == "output":
            return end
        return until(reader) if str(reader.target) in VIEWS else when[reader] + 1

    def size(value: fx.Node, layout: Layout) -> int:
        shape = list(value.meta["val"].shape)
        for placement, n in zip(layout, mesh.shape, strict=True):
            if isinstance(placement, Shard):
                shape[placement.dim] = -(-shape[placement.dim] // n)
        return math.prod(shape) * value.meta["val"].dtype.itemsize

    tangents = {end.node for end in graph.inputs_of("tangent")}
    most = 0
    for now in range(end):
        held = 0
        for value in (n for n in graph.nodes if n.op != "output" and is_tensor(n)):
            source, index = producer(value)
            assert str(source.target) not in VIEWS, "the graphs of these tests have none whose results are returned"
            mine = [(n, layout) for o, n, layout in reads if o is value]
            have, born = specs[source.name].outputs[index], when[source]
            if source.op == "placeholder":
                given = min((when[n] for n, _ in mine), default=0) if source.name in tangents else 0
                held += size(value, have) if now >= given else 0
                others, first = {layout for _, layout in mine} - {have}, min((when[n] for n, _ in mine), default=end)
            elif mine and all(n.op == "output" for n, _ in mine):
                others, first = {layout for _, layout in mine} - ({have} if now == born else set()), born
                held += size(value, have) if now == born else 0
            else:
                held += size(value, have) if born <= now < until(value) else 0
                others, first = {layout for _, layout in mine} - {have}, min((when[n] for n, _ in mine), default=end)
            held += sum(size(value, layout) for layout in others if first <= now < until(value))
        most = max(most, held)
    return most
