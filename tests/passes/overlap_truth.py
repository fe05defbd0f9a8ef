"""The communication that compute may hide, computed from a graph by its definition."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from itertools import pairwise
from math import ceil, prod

import torch
from torch import fx

from fxshard.cost import collective_time, node_time, time_price
from fxshard.graph.planning_graph import PlanningGraph, operands, producer
from fxshard.layout.layouts import Layout, all_layouts, ceil_shape
from fxshard.layout.redistribution import sent_bytes, steps, walk
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated
from fxshard.plans.plan_data import OpSpec

RELABELS = ("view", "reshape", "t.", "transpose", "permute", "_to_copy", "convert_element_type", "slice", "split", "squeeze", "expand")
"""How the names of relabelling operators begin: they change only the shape, strides, dtype or extent of one tensor."""


def is_relabel(node: fx.Node) -> bool:
    return len(operands(node)) == 1 and str(node.target).split(".", 1)[1].startswith(RELABELS)


def is_given(graph: PlanningGraph, value: fx.Node) -> bool:
    """Whether the value is a parameter, possibly relabelled."""
    while producer(value)[0].op == "call_function" and is_relabel(producer(value)[0]):
        (value,) = operands(producer(value)[0])
    return value.name in {end.node for end in graph.inputs_of("parameter")}


def is_gradient(graph: PlanningGraph, value: fx.Node) -> bool:
    """Whether the value, possibly relabelled, is returned as a parameter's gradient and used for nothing else."""
    names = {end.name for end in graph.inputs_of("parameter")}
    ends = operands(graph.module.graph.output_node())
    here = [end.kind == "gradient" and end.name in names for end, node in zip(graph.outputs, ends, strict=True) if node is value]
    readers = [u for u in value.users if u.op != "output"]
    return bool(value.users) and all(here) and all(is_relabel(u) and is_gradient(graph, u) for u in readers)


@cache
def _sent(have: Layout, want: Layout, tensor: torch.Tensor, mesh: Mesh) -> float:
    """Microseconds of collectives."""
    kind, price = (tuple(tensor.shape), tensor.dtype.itemsize, mesh), time_price(mesh)
    path = walk(have, steps(have, want, *kind, price))
    sending = [(layout, step) for layout, step, _ in path if step.kind.startswith(("all_", "reduce_"))]
    return sum(collective_time(step.kind, step.axis, sent_bytes(step, layout, *kind), mesh) for layout, step in sending)


class Truth:
    """The windows of a graph, each computed by itself, and the communication that they hide."""

    def __init__(self, annotated: Annotated) -> None:
        self.annotated, graph = annotated, annotated.graph
        self.nodes = [n for n in graph.nodes if n.name in annotated.calls]
        self.made = {v: None for v in graph.nodes if v.op == "call_function" and is_gradient(graph, v)}

    def hidden(self, specs: Mapping[str, OpSpec], value: fx.Node, want: Layout) -> float:
        """The microseconds of a redistribution of ``value`` to ``want`` that compute hides."""
        source, index = producer(value)
        have, tensor, mesh = specs[source.name].outputs[index], value.meta["val"], self.annotated.mesh
        if have is None or have == want or not mesh.hardware.overlap:
            return 0.0
        window, made = self._window(value), value in self.made
        if not window:
            return 0.0
        cut = [layout for layout in all_layouts(tensor.dim(), mesh.shape, reduce_ops=()) if str(layout).count("S") == mesh.ndim]
        ends = [(Layout.parse("P" * mesh.ndim), layout) if made else (layout, Layout.parse("R" * mesh.ndim)) for layout in cut]
        full = min(_sent(*end, tensor, mesh) for end in ends)
        sent = _sent(have, want, tensor, mesh)
        return mesh.hardware.overlap * (min(sent, window) if window >= full else min(sent * window / full, window))

    def saved(self, specs: Mapping[str, OpSpec], value: fx.Node, want: Layout) -> float:
        """The microseconds that a gradient's collective saves in a bucket, if it is the only one of its path and nothing is hidden.

        In a bucket it pays its share of the smallest message that takes ten times as long as an empty one, and its packing: the buffer is
        read and written, unless it is computed in place. Without the bucket, it pays copies that ``step_price`` counts.
        """
        source, index = producer(value)
        have, tensor, mesh = specs[source.name].outputs[index], value.meta["val"], self.annotated.mesh
        if have is None or have == want or value not in self.made or mesh.hardware.overlap:
            return 0.0
        path = walk(have, steps(have, want, tuple(tensor.shape), tensor.dtype.itemsize, mesh, time_price(mesh)))
        sending = [(layout, step) for layout, step, _ in path if step.kind.startswith(("all_", "reduce_"))]
        if len(sending) != 1:
            return 0.0
        ((layout, step),) = sending
        buffer = tensor.dtype.itemsize * prod(ceil_shape(tuple(tensor.shape), layout, mesh.shape))
        written = {"all_gather": 1 + mesh.shape[step.axis], "all_reduce": 0}.get(step.kind, 1)
        packing = 2 * buffer * written / mesh.hardware.memory_bandwidth * 1e6
        n = mesh.shape[step.axis]
        sent = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(step.kind, (n - 1) / n) * buffer
        start, alone = (collective_time(step.kind, step.axis, size, mesh) for size in (0, int(sent)))
        full = ceil(9 * start * sent / (alone - start) - 1e-6)  # bytes, up to rounding
        return max(0.0, alone - collective_time(step.kind, step.axis, full, mesh) * sent / full - packing) if sent < full else 0.0

    def _window(self, value: fx.Node) -> float:
        graph = self.annotated.graph
        if is_given(graph, value):
            places = [("read", u.name, k) for u in value.users for k, v in enumerate(operands(u)) if v is value]
            order = [n.name for n in graph.nodes]
            tangents = [graph.by_name[end.node] for end in graph.inputs_of("tangent")]
            turn = min((order.index(u.name) for t in tangents for u in t.users), default=len(order))
            early = [place for place in places if order.index(place[1]) < turn]
            return min(self.windows.get(place, 0.0) for place in early or places)
        return self.windows.get(("made", producer(value)[0].name, producer(value)[1]), 0.0) if value in self.made else 0.0

    @cached_property
    def windows(self) -> dict[tuple[str, str, int], float]:
        """(read or made, node, operand or output) -> microseconds of compute beside it."""
        annotated, nodes = self.annotated, self.nodes
        claims: list[tuple[int, tuple[str, str, int], int]] = []  # number of the node, place, bytes
        for number, node in enumerate(nodes):
            if not is_relabel(node):
                reads = [("read", k, v) for k, v in enumerate(operands(node)) if is_given(annotated.graph, v)]
                makes = [("made", producer(v)[1], v) for v in self.made if producer(v)[0] is node]
                claims += [(number, (k, node.name, i), v.meta["val"].numel() * v.meta["val"].element_size()) for k, i, v in reads + makes]
        borders = sorted({number for number, *_ in claims})
        ends = [0, *borders, len(nodes)]
        least = [min(node_time(annotated.calls[n.name], s, annotated.mesh) for s in annotated.specs[n.name]) for n in nodes]
        found = {place: 0.0 for _, place, _ in claims}
        for k, (low, high) in enumerate(pairwise(ends)):
            # a reader at border a has the eight segments that end with the a-th, a producer the eight that begin with the (a + 2)-th
            here = [(p, size) for number, p, size in claims if p[0] == "read" and 0 <= borders.index(number) - k < 8]
            here += [(p, size) for number, p, size in claims if p[0] == "made" and 2 <= k - borders.index(number) < 10]
            for place, size in here:
                found[place] += sum(least[low:high]) * size / sum(s for _, s in here)
        return found
