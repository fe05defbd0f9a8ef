"""Lets Inductor write mutated inputs in place, for example a key-value cache.

A functional program returns the new value of such an input as a result, which the caller copies back. If an operator computes it directly
from the input, a ``copy_`` at the end of the graph makes Inductor write into the input. The graph then returns the input itself, and the
caller need not copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard.graph.planning_graph import VIEWS
from fxshard.passes.after_lowering.forward_backward import returned
from fxshard.program.sharded_program import ShardedProgram


def write_in_place(program: ShardedProgram, graph: fx.Graph) -> tuple[int, ...]:
    """Adds the writes to a local graph for inference; returns the indices of the inputs that are written in place."""
    places = dict(zip((end.name for end in program.inputs), graph.find_nodes(op="placeholder"), strict=False))
    index = {end.name: i for i, end in enumerate(program.inputs)}
    values, written = list(returned(graph)), []
    read = {_source(v) for v in values if isinstance(v, fx.Node)}
    changed = {places[end.name] for end in program.outputs if end.kind == "mutation"}
    for k, end in enumerate(program.outputs):
        if end.kind != "mutation":
            continue
        place, value = places[end.name], values[k]
        same = program.output_layouts[k] == program.input_layouts[index[end.name]] and _same_metadata(place, value)
        if not same or place in read or not _is_result_of(place, value, changed):
            continue
        with graph.inserting_before(graph.output_node()):
            values[k] = graph.call_function(torch.ops.aten.copy_.default, (place, value))
        values[k].meta["val"] = place.meta["val"]
        written.append(index[end.name])
    graph.output_node().args = (tuple(values),)
    graph.lint()
    return tuple(written)


COPIES = {"aten.clone.default", "aten._to_copy.default", "prims.convert_element_type.default", "aten.copy.default"}
"""Copies that Inductor may replace by their operand."""


def _source(node: fx.Node) -> fx.Node:
    """The value of which a node is a view or a copy, or the node itself."""
    while str(node.target) in VIEWS | COPIES:
        node = node.all_input_nodes[-1]  # for ``aten.copy`` the second operand, the source
    return node


def _is_result_of(place: fx.Node, value: fx.Node, changed: set[fx.Node]) -> bool:
    """Whether an operator, not a view or a copy, computes ``value`` from ``place`` and from no other mutated input."""
    first = value.args[0] if value.op == "call_function" and value.args else None
    others = [_source(n) for n in value.all_input_nodes if n is not first]
    return first is place and str(value.target) not in VIEWS | COPIES and not any(n in changed for n in others)


def _same_metadata(place: fx.Node, value: fx.Node) -> bool:
    one, other = place.meta["val"], value.meta["val"]
    return one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()


def copy_aliased(local: list[torch.Tensor], written: Sequence[int], shared: Sequence[int]) -> list[torch.Tensor]:
    """The inputs of a call, with a copy of each ``written`` one that shares its storage with another of ``shared``."""
    counts: dict[int, int] = {}
    storages = {i: local[i].untyped_storage().data_ptr() for i in shared}
    for pointer in storages.values():
        counts[pointer] = counts.get(pointer, 0) + 1
    for i in written:
        if counts[storages[i]] > 1:
            local[i] = local[i].clone()
    return local
