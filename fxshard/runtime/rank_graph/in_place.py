"""Inputs that a model changes in place, a key-value cache for one, are written where they lie under Inductor.

Of itself a program says what becomes of such an input as a result of its own, which is made anew and copied. Where an operator makes it
of the input, a ``copy_`` at the end of the graph tells Inductor to write into the input; what is returned is then the input itself, and
nothing is left to write back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard.graph.planning_graph import VIEWS
from fxshard.passes.after_lowering.forward_backward import returned
from fxshard.program.sharded_program import ShardedProgram


def write_in_place(program: ShardedProgram, graph: fx.Graph) -> tuple[int, ...]:
    """Adds the writes to a local graph for inference; the places of the inputs that are written into."""
    places = dict(zip((end.name for end in program.inputs), graph.find_nodes(op="placeholder"), strict=False))
    index = {end.name: i for i, end in enumerate(program.inputs)}
    values, written = list(returned(graph)), []
    read = {_base(v) for v in values if isinstance(v, fx.Node)}
    changed = {places[end.name] for end in program.outputs if end.kind == "mutation"}
    for k, end in enumerate(program.outputs):
        if end.kind != "mutation":
            continue
        place, value = places[end.name], values[k]
        same = program.output_layouts[k] == program.input_layouts[index[end.name]] and _alike(place, value)
        if not same or place in read or not _made_of(place, value, changed):
            continue
        with graph.inserting_before(graph.output_node()):
            values[k] = graph.call_function(torch.ops.aten.copy_.default, (place, value))
        values[k].meta["val"] = place.meta["val"]
        written.append(index[end.name])
    graph.output_node().args = (tuple(values),)
    graph.lint()
    return tuple(written)


COPIES = {"aten.clone.default", "aten._to_copy.default", "prims.convert_element_type.default", "aten.copy.default"}
"""Operators that Inductor may take for what they read."""


def _base(node: fx.Node) -> fx.Node:
    """What a value is a view or a copy of, or itself."""
    while str(node.target) in VIEWS | COPIES:
        node = node.all_input_nodes[-1]  # of ``aten.copy`` the second, what is copied
    return node


def _made_of(place: fx.Node, value: fx.Node, changed: set[fx.Node]) -> bool:
    """Whether ``value`` is what an operator makes of an input, and not, where the operator does nothing, another input that is changed."""
    first = value.args[0] if value.op == "call_function" and value.args else None
    others = [_base(n) for n in value.all_input_nodes if n is not first]
    return first is place and str(value.target) not in VIEWS | COPIES and not any(n in changed for n in others)


def _alike(place: fx.Node, value: fx.Node) -> bool:
    one, other = place.meta["val"], value.meta["val"]
    return one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()


def apart(local: list[torch.Tensor], written: Sequence[int], shared: Sequence[int]) -> list[torch.Tensor]:
    """The inputs of a call, a copy of each that is ``written`` and has its memory in common with another of those ``shared``."""
    counts: dict[int, int] = {}
    storages = {i: local[i].untyped_storage().data_ptr() for i in shared}
    for pointer in storages.values():
        counts[pointer] = counts.get(pointer, 0) + 1
    for i in written:
        if counts[storages[i]] > 1:
            local[i] = local[i].clone()
    return local
