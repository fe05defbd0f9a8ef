"""Liveness of values, in the order of the graph: for a memory limit (``memory_use``) and the memory of a plan (``held``).

A value occupies the bytes of its shard, at ceil sizes, from the node that produces it to the last node that reads it or a view of it;
inputs and returned values stay to the end. A redistributed copy occupies its own bytes from its first reader on; a value that is only
returned is redistributed where it is produced. Views occupy nothing. Parameters are counted with their optimiser state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache

from torch import fx

from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import UNKNOWN, VIEWS, PlanningGraph, is_getitem, is_tensor, operands, planned_nodes, producer
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout, ceil_shape
from fxshard.passes.annotation.identity_cache import IdentityCache

Span = tuple[int, int]
"""Times lo <= t < hi; a time is the index of a planned node in execution order, recomputations included."""


@lru_cache(maxsize=65536)
def shard_bytes(shape: tuple[int, ...], itemsize: int, layout: Layout, sizes: tuple[int, ...]) -> int:
    """Bytes of the largest shard of a tensor on a mesh of these axis sizes; 0 if a size is known only at run time."""
    return 0 if UNKNOWN in shape else math.prod(ceil_shape(shape, layout, sizes)) * itemsize


class Lifetimes:
    """The live ranges of a graph's values, which do not depend on their layouts.

    ``second``: (node, nodes that may be recomputed right before it, in order); the times of the recomputations are in ``recomputed_at``.
    """

    def __init__(self, graph: PlanningGraph, second: Iterable[tuple[fx.Node, Iterable[fx.Node]]] = ()) -> None:
        self.graph = graph
        nodes, before, count = planned_nodes(graph), dict[fx.Node, list[fx.Node]](), itertools.count()
        for place, more in second:
            before.setdefault(place, []).extend(more)
        self.time: dict[fx.Node, int] = {}
        self.recomputed_at: dict[fx.Node, int] = {}
        for node in nodes:
            self.recomputed_at.update({one: next(count) for one in before.get(node, ())})
            self.time[node] = next(count)
        self.end = next(count)
        self.operands = {node: operands(node) for node in nodes}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node, read in self.operands.items():
            for operand in read:
                self.readers.setdefault(operand, []).append(node)
        self.tangents = {end.node for end in graph.inputs_of("tangent")}
        self.workspaces = IdentityCache()  # workspace of nodes, by node and spec: plans of one graph differ in few nodes
        self.last: dict[fx.Node, int] = {}  # the end of a value's live range
        for node in reversed(list(graph.nodes)):
            if node.op != "output" and is_tensor(node):
                reads = (self.read_until(node, r) for r in self.readers.get(node, ()))
                self.last[node] = max(reads, default=self.born(node) + 1)

    @cached_property
    def values(self) -> list[fx.Node]:
        """All tensors of the graph, views included."""
        return [n for n in self.graph.nodes if n.op != "output" and is_tensor(n)]

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of the graph's inputs and outputs, by node name."""
        found = {end.node: end.kind if end.kind in ("parameter", "buffer") else "input" for end in self.graph.inputs}
        ends = operands(self.graph.module.graph.output_node())
        for end, node in zip(self.graph.outputs, ends, strict=True):
            found.setdefault(node.name, end.kind)
        return found

    @cached_property
    def trained(self) -> set[str]:
        """Nodes of the parameters with a gradient, for which the optimiser keeps a state."""
        graded = {end.name for end in self.graph.outputs if end.kind == "gradient"}
        return {end.node for end in self.graph.inputs_of("parameter") if end.name in graded}

    @cached_property
    def backward_start(self) -> int:
        """The start of the backward: the time of the first node that reads a tangent; the end if there is none."""
        return min((self.time[n] for n in self.time if any(o.name in self.tangents for o in self.operands[n])), default=self.end)

    def in_backward(self, node: fx.Node) -> bool:
        """Whether a node runs in the backward; False for placeholders and the output node."""
        return node.op == "call_function" and self.time[node] >= self.backward_start

    def kind(self, value: fx.Node) -> str:
        kept = self.last[value] > self.backward_start > self.born(value)
        return self.kinds.get(value.name, "activation" if kept else "temporary")

    def is_view(self, node: fx.Node) -> bool:
        """Whether a node's result shares the memory of its operand."""
        return node.op == "call_function" and name_of(node.target) in VIEWS

    def born(self, value: fx.Node) -> int:
        source = producer(value)[0]
        if source.name in self.tangents:  # they arrive with the backward
            return min((self.time[r] for r in self.readers.get(value, ())), default=0)
        return 0 if source.op == "placeholder" else self.time[source]

    def read_until(self, value: fx.Node, reader: fx.Node) -> int:
        """When a reader no longer needs a value. A view needs it as long as the view itself is live."""
        if reader.op == "output":
            return self.end
        return max((self.last[v] for v in values_of(reader)), default=0) if self.is_view(reader) else self.time[reader] + 1

    def last_uses(self, node: fx.Node) -> tuple[bool, ...]:
        """For each operand whether ``node`` is its last use, so that its memory can be reused; False for views, and for
        values that are also read through a view."""
        return tuple(able and self.last[o] <= self.time[node] + 1 for o, able in zip(operands(node), self.owns_memory(node), strict=True))

    def owns_memory(self, node: fx.Node) -> tuple[bool, ...]:
        """For each operand whether it owns its memory, shares it with no other operand, and is not an input of the graph."""
        bases = {o: self._base(o) for o in operands(node)}
        own = {o for o, base in bases.items() if base is o and list(bases.values()).count(base) == 1}
        return tuple(o in own and producer(o)[0].op != "placeholder" for o in operands(node))

    def _base(self, value: fx.Node) -> fx.Node:
        """The value that owns the memory of ``value``."""
        while self.is_view(source := producer(value)[0]) and operands(source):
            value = operands(source)[0]
        return value

    def own_span(self, value: fx.Node) -> Span:
        """The live range of a value in the layout in which it is produced, whatever layouts its readers use."""
        if producer(value)[0].op == "placeholder":
            return self.born(value), self.end
        if self.only_returned(value):
            return self.born(value), max([self.born(value) + 1, *(self.own_span(r)[1] for r in self.readers[value] if r.op != "output")])
        return self.born(value), self.last[value]

    def copy_span(self, value: fx.Node, readers: Iterable[fx.Node]) -> Span:
        """The live range of a value's copy in another layout, for these readers."""
        found = list(readers)
        first = self.born(value) if self.only_returned(value) else min(self.time[r] for r in found)
        return first, max(self.read_until(value, r) for r in found)

    def only_returned(self, value: fx.Node) -> bool:
        """Whether a value and its views are returned and nothing else reads them. It is then redistributed where it is produced."""
        readers = self.readers.get(value, [])
        return bool(readers) and all(r.op == "output" or (self.is_view(r) and self.only_returned(r)) for r in readers)


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that a planned node produces: itself, or the getitems of its outputs."""
    return [node] if is_tensor(node) else [u for u in node.users if is_getitem(u)]


def parameter_state(node: fx.Node, optimizer: Optimizer) -> float:
    """Bytes of a parameter and its optimiser state, per byte of the parameter."""
    value = node.meta["val"]
    return 1 + optimizer.bytes_per_element(value.dtype) / value.dtype.itemsize
