"""The memory of a program as a rank runs it: its graph in the device's operators, split into forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import mesh_of_one
from fxshard.cost.lives import End
from fxshard.cost.memory import Stage, profile_stages
from fxshard.cost.optimizer_state import Optimizer
from fxshard.layout import local_shape
from fxshard.memory_profile import MemoryProfile
from fxshard.program import ShardedProgram
from fxshard.runtime.bind import BoundProgram, bind_graph
from fxshard.runtime.compile import parts_of, rank_graph
from fxshard.runtime.partition import forward_results


def program_memory(
    program: ShardedProgram,
    optimizer: Any = "none",
    coordinate: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    compiler: str = "eager",
) -> MemoryProfile:
    """What the rank at ``coordinate`` holds over time (default: the first, whose shards are the largest).

    Counted is a training step from the forward's first operator to the backward's last, with the optimiser's state there
    already; inputs are the rank's shards. Nothing runs, no process group is needed.
    """
    settings = Optimizer.of(optimizer)
    bound = unbound(program, coordinate, device)
    module = rank_graph(bound, compiler)
    parts = parts_of(program, module)
    given, returned = _inputs(program, bound.axes), _results(program)
    if parts is None:
        stages = [_stage(module.graph, given, returned)]
    else:
        count = forward_results(program)
        tangents = [e for e, end in zip(given, program.inputs, strict=False) if end.kind == "tangent"]
        primals = [e for e, end in zip(given, program.inputs, strict=False) if end.kind != "tangent"] + given[len(program.inputs) :]
        stages = [_stage(parts.forward.graph, primals, returned[:count]), _late(parts.backward.graph, tangents, returned[count:])]
    return profile_stages(stages, _static(program, settings, bound.coordinate))


def unbound(program: ShardedProgram, coordinate: tuple[int, ...] | None = None, device: torch.device | str = "cpu") -> BoundProgram:
    """``program`` for the rank at ``coordinate`` without process groups: they keep the names of their axes."""
    names = program.mesh.axis_names
    place = (0,) * program.mesh.ndim if coordinate is None else coordinate
    groups = {axis: axis for axis in names}
    module, axes = bind_graph(program.local(place), groups)
    return BoundProgram(program, mesh_of_one(names), place, torch.device(device), module, axes, tuple(groups.items()))


def _inputs(program: ShardedProgram, axes: tuple[str, ...]) -> list[End]:
    kinds = {"tangent": "input", "seed": "input"}
    pairs = zip(program.inputs, program.input_layouts, strict=True)
    return [End(kinds.get(e.kind, e.kind), e.name, str(layout)) for e, layout in pairs] + [End("input", f"axis index {a}") for a in axes]


def _results(program: ShardedProgram) -> list[End]:
    return [End(e.kind, e.name, str(layout)) for e, layout in zip(program.outputs, program.output_layouts, strict=True)]


def _stage(graph: fx.Graph, given: list[End], returned: list[End]) -> Stage:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Stage(graph, dict(zip(placeholders, given, strict=True)), _returned(graph, returned))


def _late(graph: fx.Graph, tangents: list[End], returned: list[End]) -> Stage:
    """The backward: what is kept is known from the forward, the tangents stand last."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Stage(graph, dict(zip(placeholders[len(placeholders) - len(tangents) :], tangents, strict=True)), _returned(graph, returned))


def _returned(graph: fx.Graph, ends: list[End]) -> dict[fx.Node, End]:
    found: dict[fx.Node, End] = {}
    for value, end in zip(graph.output_node().args[0], ends, strict=False):
        if isinstance(value, fx.Node):
            found.setdefault(value, end)
    return found


def _static(program: ShardedProgram, optimizer: Optimizer, coordinate: tuple[int, ...]) -> dict[str, int]:
    """The optimiser's state of every parameter that has a gradient."""
    graded = {o.name for o in program.outputs if o.kind == "gradient"}
    total = 0
    for i, end in enumerate(program.inputs):
        if end.kind == "parameter" and end.name in graded:
            local = local_shape(program.input_shapes[i], program.input_layouts[i], program.mesh.shape, coordinate)
            total += math.prod(local) * optimizer.bytes_per_element(getattr(torch, program.input_dtypes[i].removeprefix("torch.")))
    return {"optimizer": total}
