"""Packed dims of a graph: dims of a projection's weight and of its result that the model takes apart, as in ``[q | k | v]``.

The search starts where a dim is taken apart: a split, slices that tile it, or the selection of each index of a dim that a view has made,
(3 h) -> 3 h. The factors of the operators' rules carry the parts from there to all dims that must be cut at the same places, forward and
backward. Where these include a dim of a weight, planning may pack them (``layout.PackedShard``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from torch import fx

from fxshard.graph.call import Call, calls_of
from fxshard.graph.planning_graph import PlanningGraph, operands, outputs_of, planned_nodes, producer
from fxshard.strategies.engine.engine import resolved_rule
from fxshard.strategies.engine.factors import Factors
from fxshard.strategies.engine.packed import Packs, Parts
from fxshard.strategies.tensors.slicing import first_taken

Value = tuple[str, int]
"""(node, index of its output)."""
Packings = Mapping[Value, Mapping[int, Parts]]
"""The dims of values that may be packed, with the sizes of their parts."""
Component = dict[tuple[Value, int], Parts]
"""Dims of values that must be cut at the same places, with their parts."""

SPLITS = frozenset(
    f"aten.{name}" for name in ("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default")
)
MOST_PARTS = 16
"""A dim that is taken apart into more parts is not a packed projection."""


def packings(graph: PlanningGraph, calls: Mapping[str, Call]) -> Packings:
    """The dims of a graph that may be packed. Each has one list of parts: if a dim is taken apart in two ways, the first that is found."""
    search = _Search(graph, calls)
    known: Component = {}
    for dim, parts in search.taken_apart():
        if dim not in known:
            known |= search.component(dim, parts)
    found: dict[Value, dict[int, Parts]] = {}
    for (value, d), parts in known.items():
        if parts:
            found.setdefault(value, {})[d] = parts
    return found


def packings_of(graph: PlanningGraph) -> Packings:
    """The same, for the calls of the graph that do not depend on values known only at run time; computed once per graph."""
    if "packings" not in graph.cache:
        late = graph.run_time_causes
        graph.cache["packings"] = packings(graph, {name: call for name, call in calls_of(graph).items() if name not in late})
    found: Packings = graph.cache["packings"]
    return found


def packs_of(node: fx.Node, found: Packings) -> Packs:
    """The dims of a call's operands and outputs that may be packed; () if there are none."""
    outs = [(node.name, index) for index in range(len(outputs_of(node)))]
    packs = tuple(tuple(sorted(found.get(value, {}).items())) for value in (*map(_value, operands(node)), *outs))
    return packs if any(packs) else ()


def _value(operand: fx.Node) -> Value:
    source, index = producer(operand)
    return source.name, index


class _Search:
    """Follows dims through the calls of a graph."""

    def __init__(self, graph: PlanningGraph, calls: Mapping[str, Call]) -> None:
        self.calls = calls
        self.weights = {end.node for end in graph.inputs_of("parameter") if graph.by_name[end.node].meta["val"].dim() > 1}
        self.reads: dict[str, tuple[Value, ...]] = {}
        self.readers: dict[Value, list[tuple[str, int]]] = {}
        for node in planned_nodes(graph):
            if node.name in calls:
                self.reads[node.name] = tuple(map(_value, operands(node)))
                for k, value in enumerate(self.reads[node.name]):
                    self.readers.setdefault(value, []).append((node.name, k))
        self._rules: dict[int, tuple[Factors, dict[str, int]] | None] = {}

    def taken_apart(self) -> Iterator[tuple[tuple[Value, int], Parts]]:
        """Dims that are taken apart, with the sizes of the parts: of one element each if each index is selected."""
        pieces: dict[tuple[Value, int], set[tuple[int, int]]] = {}
        for name, read in self.reads.items():
            call = self.calls[name]
            if call.op in SPLITS or call.op == "aten.unbind.int":
                position = 1 if call.op == "aten.unbind.int" else 2
                d = call.arg(position, "dim", 0) % call.operands[0].ndim
                sizes = tuple(1 if position == 1 else o.shape[d] for o in call.outputs if o is not None)
                if len(sizes) == len(call.outputs):
                    yield from _proper((read[0], d), sizes)
            elif (piece := _piece(call)) is not None:
                pieces.setdefault((read[0], piece[0]), set()).add(piece[1:])
        for dim, ends in pieces.items():
            value, d = dim
            size = self._shape(value, d)
            cuts = sorted(ends)
            if cuts[0][0] == 0 and cuts[-1][1] == size and all(a[1] == b[0] for a, b in itertools.pairwise(cuts)):
                yield from _proper(dim, tuple(end - start for start, end in cuts))

    def _shape(self, value: Value, d: int) -> int:
        name, k = self.readers[value][0]
        return self.calls[name].operands[k].shape[d]

    def component(self, dim: tuple[Value, int], parts: Parts) -> Component:
        """The dims that must be cut where ``dim`` is; without parts if they cannot be packed: none is a weight's, or two disagree."""
        found, to_do, agree = {dim: parts}, [dim], True
        while to_do:
            value, d = here = to_do.pop()
            places = [(name, k) for name, k in self.readers.get(value, ())]
            if value[0] in self.calls:
                places.append((value[0], len(self.reads[value[0]]) + value[1]))
            for name, tensor in places:
                for other, those in self._beside(name, tensor, d, found[here]):
                    agree = agree and found.get(other, those) == those
                    if other not in found:
                        found[other] = those
                        to_do.append(other)
        weighty = any(value[0] in self.weights for value, _ in found)
        return found if agree and weighty else dict.fromkeys(found, ())

    def _beside(self, name: str, tensor: int, d: int, parts: Parts) -> Iterator[tuple[tuple[Value, int], Parts]]:
        """The other dims of a call that have the outermost factor of dim ``d`` of a tensor, with their parts."""
        resolved = self._rule(self.calls[name])
        if resolved is None:
            return
        rule, sizes = resolved
        tensors = [*rule.operands, *rule.outputs]
        dims = tensors[tensor]
        names = dims[d] if dims is not None else ()
        if not names or names[0] in rule.replicated:
            return
        inside = math.prod(sizes[f] for f in names[1:])
        if any(part % inside for part in parts):
            return
        values = [*self.reads[name], *((name, index) for index in range(len(rule.outputs)))]
        for value, others in zip(values, tensors, strict=True):
            for place, other in enumerate(others or ()):
                if other and other[0] == names[0]:
                    length = math.prod(sizes[f] for f in other[1:])
                    yield (value, place), tuple(part // inside * length for part in parts)

    def _rule(self, call: Call) -> tuple[Factors, dict[str, int]] | None:
        if id(call) not in self._rules:
            self._rules[id(call)] = resolved_rule(call)
        return self._rules[id(call)]


def _proper(dim: tuple[Value, int], parts: Parts) -> Iterator[tuple[tuple[Value, int], Parts]]:
    """The parts of a dim, if they are some, and not too many, of known sizes."""
    if 1 < len(parts) <= MOST_PARTS and all(isinstance(part, int) and part > 0 for part in parts):
        yield dim, parts


def _piece(call: Call) -> tuple[int, int, int] | None:
    """(dim, start, end) of what a slice or a selection takes; None for other calls, and if it takes all, or with steps."""
    if call.op not in ("aten.slice.Tensor", "aten.select.int"):
        return None
    shape = call.operands[0].shape
    if call.op == "aten.select.int":
        d, index = call.arg(1) % len(shape), call.arg(2)
        if not all(isinstance(v, int) for v in (index, shape[d])):
            return None
        return d, index % shape[d], index % shape[d] + 1
    d = call.arg(1, "dim", 0) % len(shape)
    start, end, step = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    if step != 1 or not all(isinstance(v, int) for v in (start or 0, end or 0, shape[d])):
        return None
    first, last = first_taken(start, shape[d]), shape[d] if end is None else first_taken(end, shape[d])
    return None if (first, last) == (0, shape[d]) or first >= last else (d, first, last)
