"""Buffers that a forward assigns (``self.steps = self.steps + 1``): the graph writes them in place, at its end.

Dynamo treats the assignment as a side effect, which a graph cannot express. During the capture, each assignment is followed by a node
``fxshard.assigned`` of the new value; the last one for a buffer becomes a copy into it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard.errors import TraceError
from fxshard.graph.planning_graph import source_line

ASSIGNED = torch.ops.fxshard.assigned.default


def write_assigned(captured: fx.GraphModule, model: nn.Module, names: dict[str, str]) -> None:
    """Replaces the ``assigned`` nodes by copies into the buffers. ``names``: attribute of ``captured`` -> the model's name; buffers that
    are only assigned are added.

    Raises TraceError if a buffer would get another shape or dtype.
    """
    notes = captured.graph.find_nodes(op="call_function", target=ASSIGNED)
    last = {note.args[1]: note for note in notes}
    held = {name: target for target, name in names.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, note in last.items():
        buffer, value = buffers.get(name), note.args[0].meta.get("example_value", note.args[0].meta.get("val"))
        if buffer is None or (value is not None and (value.shape, value.dtype) != (buffer.shape, buffer.dtype)):
            have = "None" if buffer is None else f"{tuple(buffer.shape)}, {buffer.dtype}"
            what = f"buffer {name} ({have}) is assigned a tensor of another kind"
            raise TraceError(what, where=source_line(note) or name, remedy="register it as it will be, or keep the value in an output")
        target = held.get(name) or _add(captured, name, buffer, names)
        with captured.graph.inserting_before(captured.graph.output_node()):
            place = captured.graph.get_attr(target)
            place.meta = {"example_value": buffer, "val": buffer}
            written = captured.graph.call_method("copy_", (place, captured.graph.call_method("detach", (note.args[0],))))
            written.meta = dict(note.meta)
    for note in notes:
        captured.graph.erase_node(note)
    if notes:
        captured.recompile()


def _add(captured: fx.GraphModule, name: str, buffer: torch.Tensor, names: dict[str, str]) -> str:
    target = "assigned_" + name.replace(".", "_")
    captured.register_buffer(target, buffer)
    names[target] = name
    return target


def names_of_modules(model: nn.Module) -> Mapping[int, str]:
    """Id of a module -> its name, the first one for a module that occurs more than once."""
    return {id(module): name for name, module in model.named_modules()}
