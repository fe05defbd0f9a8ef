"""cuts: where a graph that repeats itself is best cut into its repeats, and what is left out of them. Part of ``outline``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from fxshard._torch_compat import OpOverload, schema_of
from fxshard.graph.planning_graph import VIEWS, is_getitem
from fxshard.program.sharded_program import is_collective, is_wait
from fxshard.runtime.compile.repeats import Run
from fxshard.runtime.compile.size_nodes import bytes_at_example, values_read

JOINED = {"prims.convert_element_type.default", "aten.clone.default", "prims.iota.default"}
"""Further operators that Inductor computes in one kernel with others."""


def is_view(node: fx.Node) -> bool:
    """Whether the call only relabels the memory of the one value that it reads; entries of such a call's list among them."""
    if node.op != "call_function" or len(values_read(node)) != 1 or is_wait(node):
        return False
    if is_getitem(node):
        return is_view(node.all_input_nodes[0])
    schema = schema_of(node.target)
    aliases = schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return aliases or str(node.target) in VIEWS


def leaves(graph: fx.Graph) -> set[fx.Node]:
    """What only brings results to the end of the graph: buckets of gradients, collectives on them, and what becomes of those.

    Where buckets end does not follow the repeats. A product that goes into a bucket is a leaf too: it is computed where it lies in there.
    """
    found: set[fx.Node] = set()
    joined: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not all(u.op == "output" or u in found for u in node.users):
            continue
        into = any(u in joined for u in node.users) and (is_view(node) or not _fuses(node))
        if into or node.target is torch.ops.aten.cat.default:
            joined.add(node)
        source = node.all_input_nodes[0] if is_getitem(node) else node
        if node in joined or is_view(node) or is_collective(source) or is_wait(node) or any(map(is_wait, node.all_input_nodes)):
            found.add(node)
    return found


def stays(node: fx.Node) -> bool:
    """Whether a node of a repeat stays in the graph.

    Collectives do and what waits for them, so that their order is the same on ranks whose graphs differ, and so that whoever plans memory
    sees when their buffers are free; calls that write, and what they write, which may be computed where it goes; and what is no operator.
    """
    if is_getitem(node):
        return stays(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node):
        return True
    return _writes(node) or any(map(_writes, node.users))


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable


class Cuts:
    """What a cut before each of a sequence of calls would cost, counted once for all runs.

    In this order: lists that pass the cut, which no subgraph takes; bytes of what one kernel would compute and use on both sides; values
    that pass. ``codes`` has a number for each node, the same for nodes that are alike: runs that are alike are cut alike.
    """

    def __init__(self, nodes: Sequence[fx.Node], codes: np.ndarray) -> None:
        place = {n: i for i, n in enumerate(nodes)}
        changes = np.zeros((3, len(nodes) + 2), dtype=np.int64)
        depth = _depths(nodes)
        for i, node in enumerate(nodes):
            value = node.meta.get("val")
            readers = [u for u in node.users if u in place]
            near = [u for u in readers if _fuses(node) and _fuses(u) and depth[u] == depth[node]]
            if not isinstance(value, torch.Tensor):
                _pass(changes[0], i, [place[u] for u in readers], 1)
            elif near:
                _pass(changes[1], i, [place[u] for u in near], bytes_at_example(value))
            _pass(changes[2], i, [place[u] for u in readers], 1)
        self._costs, self._codes = changes.cumsum(axis=1), codes

    def of(self, run: Run) -> range:
        """Where the repeats of ``run`` begin, cut where that costs the least; none where every cut would part a list from its entries."""
        second = run.start + run.period
        places = range(second, min(second + run.period, run.stop))
        best = min(places, key=lambda i: (*self._costs[:, i], self._codes[i : i + run.period].tolist()))
        if self._costs[0, best]:
            return range(0)
        return range(best - run.period, run.stop - run.period + 1, run.period)


def _pass(changes: np.ndarray, start: int, readers: Sequence[int], cost: int) -> None:
    """A value made at ``start`` passes each cut up to its last reader."""
    if readers:
        changes[start + 1] += cost
        changes[max(readers) + 1] -= cost


def _depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many kernels are called one after the other up to each node, at most: what is not equally deep is never in one kernel."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        depth[node] = max((depth.get(n, 0) for n in node.all_input_nodes), default=0) + (not _fuses(node))
    return depth


def _fuses(node: fx.Node) -> bool:
    """Whether Inductor may compute the call in one kernel with others."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or is_view(node) or str(node.target) in JOINED
