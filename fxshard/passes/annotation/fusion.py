"""What a compiler's fusion leaves of the memory traffic of pointwise operators and reductions, on hardware whose price list says so.

Inductor joins a pointwise operator or reduction with its neighbours into one kernel, unless a *border* lies between them: a product,
attention, or any other operator with a kernel of its own. A *group* is what one kernel computes: operators with equally many borders before
them that read each other's results or the same value. Of a group

- a value that only the group reads is never written;
- a value from outside is read once, however many of its operators need it;
- a value that only a later group reads is not saved if it follows from one value of as many elements that is in memory, in as few bytes or
  fewer: the later kernel reads that and computes it again, as torch's partitioner does between forward and backward.

The result is a weight for each tensor of a call (``Call.traffic``). It does not depend on layouts; a redistribution within a group, which
splits the kernel, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import fx

from fxshard._torch_compat import OpOverload
from fxshard.graph.planning_graph import VIEWS, PlanningGraph, example_shape, is_getitem, is_tensor, operands, outputs_of
from fxshard.graph.targets import name_of

FUSED = {
    "aten._to_copy.default",
    "prims.convert_element_type.default",
    "aten.cat.default",
    "fxshard.sum_exp.default",
    "fxshard.target_score.default",
    "fxshard.cross_entropy_backward.default",
}
"""Operators that fuse though torch does not tag them as pointwise or as reductions."""

Weights = tuple[float, ...]


def traffic_of(graph: PlanningGraph) -> Mapping[str, Weights]:
    """Node -> the fraction of each operand that it reads from memory, then of each output that it writes; for nodes that fuse."""
    if "traffic" not in graph.cache:
        graph.cache["traffic"] = _Kernels(list(graph.nodes)).weights()
    found: Mapping[str, Weights] = graph.cache["traffic"]
    return found


class _Kernels:
    """The groups of a graph. ``borders``: before a node; ``readers``: of a value, through views; ``seen``: (group, value)
    already read; ``kept``: values that a later group reads."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.borders: dict[fx.Node, int] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.parents: dict[fx.Node, fx.Node] = {}
        self.sources: dict[fx.Node, fx.Node] = {}
        self.seen: set[tuple[fx.Node, fx.Node]] = set()
        self.kept: set[fx.Node] = set()
        self.fused = [node for node in nodes if _fuses(node)]
        for node in nodes:
            read = dict.fromkeys(node.all_input_nodes)
            self.borders[node] = max((self.borders[one] + _is_border(one) for one in read), default=0)
            for value in () if _is_view(node) else dict.fromkeys(map(_base, read)):
                self.readers.setdefault(value, []).append(node)
        for value, readers in self.readers.items():
            first: dict[int, fx.Node] = {}
            for one in (one for one in (value, *readers) if _fuses(one)):
                self.parents[self.group(one)] = self.group(first.setdefault(self.borders[one], one))

    def group(self, node: fx.Node) -> fx.Node:
        """One node that stands for the group."""
        while (parent := self.parents.get(node, node)) is not node:
            node = parent
        return node

    def weights(self) -> dict[str, Weights]:
        reads = {node: [self._read(node, value) for value in operands(node)] for node in self.fused}
        return {node.name: (*found, *(self._written(node),) * len(outputs_of(node))) for node, found in reads.items()}

    def _read(self, node: fx.Node, value: fx.Node) -> float:
        made, mine = _base(value), self.group(node)
        if _fuses(made) and self.group(made) is mine:
            return 0.0
        source = self._source(made) if _size(value) == _size(made) else value
        self.kept.add(source if source is not value else made)
        if (mine, source) in self.seen:
            return 0.0
        self.seen.add((mine, source))
        return _itemsize(source) / _itemsize(value)

    def _written(self, node: fx.Node) -> float:
        return float(node in self.kept or not all(map(_fuses, self.readers.get(node, ()))))

    def _source(self, made: fx.Node) -> fx.Node:
        """What a later kernel reads to compute ``made`` again; ``made`` itself if it does not fuse, or must be saved."""
        if made not in self.sources:
            found = [_base(o) for o in operands(made)] if _fuses(made) else []
            inside = {one: self.group(one) is self.group(made) if _fuses(one) else False for one in found}
            wide = dict.fromkeys(self._source(one) if inside[one] else one for one in found if _size(one) == _size(made))
            only = next(iter(wide)) if len(wide) == 1 else made
            self.sources[made] = only if _itemsize(only) <= _itemsize(made) else made
        return self.sources[made]


def _is_view(node: fx.Node) -> bool:
    return is_getitem(node) or (node.op == "call_function" and isinstance(node.target, OpOverload) and name_of(node.target) in VIEWS)


def _base(value: fx.Node) -> fx.Node:
    """The value of which ``value`` is a view."""
    while _is_view(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value


def _is_border(node: fx.Node) -> bool:
    """Whether it has a kernel of its own. What has no operands, as a tensor of zeros, fuses with its readers."""
    return node.op == "call_function" and bool(node.all_input_nodes) and not _is_view(node) and not _fuses(node)


@lru_cache(maxsize=4096)
def _tagged(target: OpOverload) -> bool:
    return torch.Tag.pointwise in target.tags or torch.Tag.reduction in target.tags or name_of(target) in FUSED


def _fuses(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or not is_tensor(node) or _is_view(node):
        return False
    return _tagged(node.target)


def _first(node: fx.Node) -> torch.Tensor | None:
    return next(iter(outputs_of(node)), None)


def _size(node: fx.Node) -> int:
    """Elements of a node's first result; 0 if it is no tensor."""
    value = _first(node)
    return 0 if value is None else math.prod(example_shape(value.shape))


def _itemsize(node: fx.Node) -> int:
    value = _first(node)
    return 1 if value is None else value.dtype.itemsize
