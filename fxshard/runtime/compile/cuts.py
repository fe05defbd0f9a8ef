"""cuts: where to cut a repetitive graph into its repeats, and which nodes stay outside them. Part of ``outline``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.operators import schema_of
from fxshard.graph.planning_graph import VIEWS, is_getitem
from fxshard.program.sharded_program import is_collective, is_wait
from fxshard.runtime.compile.repeats import RepeatedRun
from fxshard.runtime.compile.size_nodes import bytes_at_example, value_operands

FUSIBLE = {"prims.convert_element_type.default", "aten.clone.default", "prims.iota.default"}
"""Operators, besides pointwise ones and reductions, that Inductor fuses with others."""


def is_view(node: fx.Node) -> bool:
    """Whether the call returns a view of its only operand, or an entry of a list of such views."""
    if node.op != "call_function" or len(value_operands(node)) != 1 or is_wait(node):
        return False
    if is_getitem(node):
        return is_view(node.all_input_nodes[0])
    schema = schema_of(node.target)
    aliases = schema is not None and not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
    return aliases or str(node.target) in VIEWS


def epilogue_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that only prepare outputs of the graph: buckets of gradients, collectives on them, and what follows those.

    Bucket boundaries do not follow the repeats. A matrix product whose result goes into a bucket belongs here too: Inductor computes it
    inside the bucket.
    """
    found: set[fx.Node] = set()
    joined: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or not all(u.op == "output" or u in found for u in node.users):
            continue
        into = any(u in joined for u in node.users) and (is_view(node) or not _is_fusible(node))
        if into or node.target is torch.ops.aten.cat.default:
            joined.add(node)
        source = node.all_input_nodes[0] if is_getitem(node) else node
        if node in joined or is_view(node) or is_collective(source) or is_wait(node) or any(map(is_wait, node.all_input_nodes)):
            found.add(node)
    return found


FUSED_FLEX = (torch.ops.fxshard.flex_attention_fused.default, torch.ops.fxshard.flex_attention_fused_backward.default)


def stays_outside(node: fx.Node) -> bool:
    """Whether a node of a repeat stays in the graph, outside of subgraphs.

    Collectives and their waits do, so that their order is the same on ranks with different graphs, and so that memory planning sees when
    their buffers are free. So do calls that mutate, the values that they write, which may be computed in place, attention that becomes a
    call of graphs of its own (``flex_kernels``), and calls of anything but operators.
    """
    if is_getitem(node):
        return stays_outside(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or is_collective(node) or is_wait(node) or node.target in FUSED_FLEX:
        return True
    return _writes(node) or any(map(_writes, node.users))


def _writes(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.is_mutable


class CutCosts:
    """The costs of a cut before each call of a sequence, computed once for all runs.

    They are compared in this order: lists that cross the cut, which no subgraph can take; bytes of values that one kernel would otherwise
    compute and use; number of values that cross. ``codes``: a number for each node, equal for equal nodes, so that equal runs have
    equal cuts.
    """

    def __init__(self, nodes: Sequence[fx.Node], codes: np.ndarray) -> None:
        place = {n: i for i, n in enumerate(nodes)}
        changes = np.zeros((3, len(nodes) + 2), dtype=np.int64)
        depth = _kernel_depths(nodes)
        for i, node in enumerate(nodes):
            value = node.meta.get("val")
            readers = [u for u in node.users if u in place]
            near = [u for u in readers if _is_fusible(node) and _is_fusible(u) and depth[u] == depth[node]]
            if not isinstance(value, torch.Tensor):
                _add_crossing(changes[0], i, [place[u] for u in readers], 1)
            elif near:
                _add_crossing(changes[1], i, [place[u] for u in near], bytes_at_example(value))
            _add_crossing(changes[2], i, [place[u] for u in readers], 1)
        self._costs, self._codes = changes.cumsum(axis=1), codes

    def best_starts(self, run: RepeatedRun) -> range:
        """The starts of the repeats of ``run`` at the cheapest cut; empty if every cut would separate a list from its entries."""
        second = run.start + run.period
        places = range(second, min(second + run.period, run.stop))
        best = min(places, key=lambda i: (*self._costs[:, i], self._codes[i : i + run.period].tolist()))
        if self._costs[0, best]:
            return range(0)
        return range(best - run.period, run.stop - run.period + 1, run.period)


def _add_crossing(changes: np.ndarray, start: int, readers: Sequence[int], cost: int) -> None:
    """Adds the cost of a value computed at ``start``, which crosses every cut up to its last user."""
    if readers:
        changes[start + 1] += cost
        changes[max(readers) + 1] -= cost


def _kernel_depths(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The longest chain of kernels up to each node; nodes of different depth are never fused."""
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        depth[node] = max((depth.get(n, 0) for n in node.all_input_nodes), default=0) + (not _is_fusible(node))
    return depth


def _is_fusible(node: fx.Node) -> bool:
    """Whether Inductor may fuse the call with others."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or is_view(node) or str(node.target) in FUSIBLE
