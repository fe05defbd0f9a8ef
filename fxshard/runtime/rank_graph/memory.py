"""The memory of a program on one rank, from its graph in the device's operators, split into forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from fxshard._torch_compat.dtensor.rules import mesh_of_one
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.memory_profile import MemoryProfile
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.rank_graph.bind import BoundProgram, bind_graph
from fxshard.runtime.rank_graph.rank_graph import check_limit, local_profile, profile, rank_graph, split_graph


def program_memory(
    program: ShardedProgram,
    optimizer: Any = "none",
    coordinate: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
    compiler: str = "eager",
) -> MemoryProfile:
    """The memory of the rank at ``coordinate`` over time (default: the first, whose shards are the largest).

    Counts a training step from the forward's first operator to the backward's last, with the optimiser's state already allocated. Inputs
    are the rank's shards, dynamic sizes the example's. Runs nothing and needs no process group.
    """
    settings = Optimizer.of(optimizer)
    program = program_at(program, {one.name: one.example for one in program.sizes})
    bound = unbound(program, coordinate, device)
    module = rank_graph(bound, compiler)
    parts = split_graph(bound, module)
    if compiler == "eager":  # other compilers fuse operators, which the graph does not show
        check_limit(bound, module, parts)
    return profile(bound, module, parts, settings)


def local_graph_memory(program: ShardedProgram) -> MemoryProfile:
    """The memory of the first rank over its local graph as a program's file holds it: neutral operators, forward and backward in one.

    Its steps have the names of the graph's nodes. The peak is that of ``program_memory`` but for operators that the device splits.
    """
    return local_profile(unbound(program_at(program, {one.name: one.example for one in program.sizes})))


def unbound(program: ShardedProgram, coordinate: tuple[int, ...] | None = None, device: torch.device | str = "cpu") -> BoundProgram:
    """``program`` for the rank at ``coordinate`` without process groups; where those would be named, axes are."""
    names = program.mesh.axis_names
    place = (0,) * program.mesh.ndim if coordinate is None else coordinate
    groups = {axis: axis for axis in names}
    module, axes = bind_graph(program.local(place), groups)
    return BoundProgram(program, mesh_of_one(names), place, torch.device(device), lambda: module, axes, tuple(groups.items()))
