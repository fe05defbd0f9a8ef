"""When values are in memory, in the order of the graph: what the planner limits, and what a plan is said to need.

A value takes the bytes of its shard, at ceil sizes, from the node that makes it to the last node that reads it or a view of it;
inputs and what is returned stay to the end. One that is brought into another layout takes the bytes of that one too, from its first
reader on (what is only returned is brought there at once). Views take nothing. Parameters come with their optimiser's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import fx

from fxshard.cost.optimizer_state import Optimizer
from fxshard.layout import Layout, ceil_shape
from fxshard.mesh import Mesh
from fxshard.planning_graph import FREE, UNKNOWN, PlanningGraph, is_getitem, is_tensor, operands, plain_shape, planned_nodes, producer
from fxshard.sharding_plan import OpSpec, Redistribution

Span = tuple[int, int]
"""Times lo <= t < hi; a time is the index of a planned node."""


@lru_cache(maxsize=65536)
def shard_bytes(shape: tuple[int, ...], itemsize: int, layout: Layout, sizes: tuple[int, ...]) -> int:
    """Bytes of the largest shard of a tensor on a mesh of these sizes; 0 where only running tells."""
    return 0 if UNKNOWN in shape else math.prod(ceil_shape(shape, layout, sizes)) * itemsize


@dataclass(frozen=True)
class Held:
    """One stretch of memory: of which value, for what (one of ``memory_profile.KINDS``), when, how many bytes, in which layout."""

    value: str
    kind: str
    span: Span
    bytes: int
    layout: Layout


class Lifetimes:
    """The times of a graph's values, whatever their layouts."""

    def __init__(self, graph: PlanningGraph) -> None:
        self.graph = graph
        nodes = planned_nodes(graph)
        self.time = {node: k for k, node in enumerate(nodes)}
        self.end = len(nodes)
        self.operands = {node: operands(node) for node in nodes}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        for node, read in self.operands.items():
            for operand in read:
                self.readers.setdefault(operand, []).append(node)
        self.tangents = {end.node for end in graph.inputs_of("tangent")}
        self._last: dict[fx.Node, int] = {}
        for node in reversed(list(graph.nodes)):
            if node.op != "output" and is_tensor(node):
                reads = (self.read_until(node, r) for r in self.readers.get(node, ()))
                self._last[node] = max(reads, default=self.born(node) + 1)

    @cached_property
    def values(self) -> list[fx.Node]:
        """All tensors of the graph, views too."""
        return [n for n in self.graph.nodes if n.op != "output" and is_tensor(n)]

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """What the values at the ends of the graph are, by node."""
        found = {end.node: end.kind if end.kind in ("parameter", "buffer") else "input" for end in self.graph.inputs}
        ends = operands(self.graph.module.graph.output_node())
        for end, node in zip(self.graph.outputs, ends, strict=True):
            found.setdefault(node.name, end.kind)
        return found

    @cached_property
    def trained(self) -> set[str]:
        """Nodes of the parameters that have a gradient, which an optimiser keeps a state for."""
        graded = {end.name for end in self.graph.outputs if end.kind == "gradient"}
        return {end.node for end in self.graph.inputs_of("parameter") if end.name in graded}

    @cached_property
    def turn(self) -> int:
        """When the backward begins: at the first node that reads a tangent, the end where none does."""
        return min((self.time[n] for n in self.time if any(o.name in self.tangents for o in self.operands[n])), default=self.end)

    def late(self, node: fx.Node) -> bool:
        """Whether a node runs in the backward; what returns values is of neither half."""
        return node.op == "call_function" and self.time[node] >= self.turn

    def kind(self, value: fx.Node) -> str:
        kept = self._last[value] > self.turn > self.born(value)
        return self.kinds.get(value.name, "activation" if kept else "temporary")

    def is_view(self, node: fx.Node) -> bool:
        """Whether what a node gives lies in the memory of what it reads."""
        return node.op == "call_function" and str(node.target) in FREE

    def born(self, value: fx.Node) -> int:
        source = producer(value)[0]
        if source.name in self.tangents:  # they come when the backward begins
            return min((self.time[r] for r in self.readers.get(value, ())), default=0)
        return 0 if source.op == "placeholder" else self.time[source]

    def read_until(self, value: fx.Node, reader: fx.Node) -> int:
        """When a reader needs a value no more: a view needs it as long as it is needed itself."""
        if reader.op == "output":
            return self.end
        return max((self._last[v] for v in values_of(reader)), default=0) if self.is_view(reader) else self.time[reader] + 1

    def own(self, value: fx.Node) -> Span:
        """When a value is there in the layout in which it is made, whichever its readers choose to read."""
        if producer(value)[0].op == "placeholder":
            return self.born(value), self.end
        if self.only_returned(value):
            return self.born(value), max([self.born(value) + 1, *(self.own(r)[1] for r in self.readers[value] if r.op != "output")])
        return self.born(value), self._last[value]

    def moved(self, value: fx.Node, readers: Iterable[fx.Node]) -> Span:
        """When it is there in another layout, for these readers of it."""
        found = list(readers)
        first = self.born(value) if self.only_returned(value) else min(self.time[r] for r in found)
        return first, max(self.read_until(value, r) for r in found)

    def only_returned(self, value: fx.Node) -> bool:
        """Whether it, or views of it, are returned and nothing else: it is brought into the layout asked for where it is made."""
        readers = self.readers.get(value, [])
        return bool(readers) and all(r.op == "output" or (self.is_view(r) and self.only_returned(r)) for r in readers)


def values_of(node: fx.Node) -> list[fx.Node]:
    """The values that a planned node gives: itself, or those of its results that are read."""
    return [node] if is_tensor(node) else [u for u in node.users if is_getitem(u)]


def parameter_state(node: fx.Node, optimizer: Optimizer) -> float:
    """Bytes of a parameter with its optimiser's state, for each byte of itself."""
    value = node.meta["val"]
    return 1 + optimizer.bytes_per_element(value.dtype) / value.dtype.itemsize


def held(times: Lifetimes, specs: Mapping[str, OpSpec], moves: Sequence[Redistribution], mesh: Mesh, optimizer: Optimizer) -> list[Held]:
    """What a plan holds, and when; a value that is read in other layouts only dies once it has been brought into them."""
    found = []
    entries: dict[str, list[Redistribution]] = {}
    for move in moves:
        entries.setdefault(move.value, []).append(move)
    for value in times.values:
        source, index = producer(value)
        kind, have = times.kind(value), specs[source.name].outputs[index]
        if not times.is_view(source):
            size = _bytes(value, have, mesh)
            span = times.own(value) if source.op == "placeholder" else (times.born(value), _until(value, times, entries, specs))
            found.append(Held(value.name, kind, span, size, have))
            if value.name in times.trained and (extra := round(size * (parameter_state(value, optimizer) - 1))):
                found.append(Held(value.name, "optimizer", (0, times.end), extra, have))
        mine = entries.get(value.name, [])
        for entry in mine:
            returned = entry.readers and all(reader == "output" for reader, _ in entry.readers)
            why = kind if returned else "gathered" if any(step.is_collective for step in entry.steps) else "temporary"
            found.append(Held(value.name, why, _moved(value, entry, times, mine, have), _bytes(value, entry.target, mesh), entry.target))
    return found


Entries = Mapping[str, Sequence[Redistribution]]


def _until(value: fx.Node, times: Lifetimes, entries: Entries, specs: Mapping[str, OpSpec]) -> int:
    """When a value is needed no more in the layout in which it is made."""
    source, index = producer(value)
    moves, have = entries.get(value.name, ()), specs[source.name].outputs[index]
    moved = {reader for entry in moves for reader in entry.readers}
    ends = [times.born(value) + 1]
    ends += [_moved(value, entry, times, moves, have)[0] + 1 for entry in moves if entry.source == have]
    for reader in times.readers.get(value, []):
        if any(o is value and (reader.name, k) not in moved for k, o in enumerate(times.operands[reader])):
            views = values_of(reader) if times.is_view(reader) else []
            ends += [_until(v, times, entries, specs) for v in views] or [times.read_until(value, reader)]
    return max(ends)


def _moved(value: fx.Node, entry: Redistribution, times: Lifetimes, entries: Sequence[Redistribution], have: Layout | None) -> Span:
    """When what a redistribution gives is there: for its readers, and until others are made that start from it."""
    lo, hi = times.moved(value, [times.graph.by_name[name] for name, _ in entry.readers]) if entry.readers else (times.end, 0)
    if entry.source == have:
        after = [one for one in entries if one.source == entry.target and one.source != have]
        hi = max([hi, *(_moved(value, one, times, entries, have)[0] + 1 for one in after)])
    if entry.ahead:
        lo = min(times.time[r] for r in times.readers[value])
    return lo, hi


def peak(held_: Sequence[Held]) -> tuple[int, int]:
    """(time, bytes) of the most that is held at once, the first time it is."""
    changes: dict[int, int] = {}
    for one in held_:
        changes[one.span[0]] = changes.get(one.span[0], 0) + one.bytes
        changes[one.span[1]] = changes.get(one.span[1], 0) - one.bytes
    best, now, total = 0, 0, 0
    for time in sorted(changes):
        total += changes[time]
        if total > now:
            best, now = time, total
    return best, now


def _bytes(value: fx.Node, layout: Layout | None, mesh: Mesh) -> int:
    assert layout is not None
    tensor = value.meta["val"]
    return shard_bytes(plain_shape(tensor.shape), tensor.dtype.itemsize, layout, mesh.shape)
