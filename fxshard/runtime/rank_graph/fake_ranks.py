"""fake_ranks: one rank of a program, bound in torch's fake process group, whose collectives send nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fxshard.errors import RunError
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.rank_graph.bind import BoundProgram, bind


@contextlib.contextmanager
def fake_ranks(program: ShardedProgram, coordinate: tuple[int, ...] | None, device: str = "cpu") -> Iterator[BoundProgram]:
    """``program`` bound for the rank at ``coordinate`` (by default the first) on a ``device``; raises RunError in a process that has a
    process group."""
    if dist.is_initialized():
        what = "this process has a process group, and the compiled program would run in it"
        raise RunError(what, remedy="call it in a process of its own, before init_process_group")
    mesh = program.mesh
    dist.init_process_group("fake", rank=mesh.rank(coordinate or (0,) * mesh.ndim), world_size=mesh.size)
    try:
        place = torch.device(device, 0) if device != "cpu" else None
        yield bind(program, init_device_mesh(device, mesh.shape, mesh_dim_names=mesh.axis_names), place)
    finally:
        dist.destroy_process_group()
