"""Weights in one file per rank: cut for the ranks of a program, read by one rank, or put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxshard import archive
from fxshard.archive.container import Listed
from fxshard.archive.weights import weights_needed
from fxshard.errors import FileError
from fxshard.files import REMAKE
from fxshard.layout.layouts import Layout, local_shape
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.inputs import as_dtensor
from fxshard.runtime.simulate.shards import gather, scatter


def layouts_in_files(program: ShardedProgram) -> dict[str, Layout]:
    """The layout of each weight in the ranks' files: a parameter's own; buffers are whole, as modules hold them."""
    ends = zip(program.inputs, program.input_layouts, strict=True)
    whole = Layout.replicated(program.mesh.ndim)
    return {e.name: layout if e.kind == "parameter" else whole for e, layout in ends if e.kind in ("parameter", "buffer")}


def cut(program: ShardedProgram, weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """What each rank holds of whole ``weights``, rank by rank."""
    layouts = layouts_in_files(program)
    for coordinate in program.mesh.coordinates():
        yield {name: scatter(weights[name], layout, program.mesh, coordinate).cpu() for name, layout in layouts.items()}


@dataclass(frozen=True)
class RankFiles:
    """The files with the ranks' weights beside the program at ``path``, and what its manifest says of them."""

    path: Path
    listed: tuple[Listed, ...]

    @property
    def digest(self) -> str:
        """A text that is equal on ranks with the same files."""
        return " ".join(one.sha256 for one in self.listed)

    def local(self, program: ShardedProgram, rank: int) -> dict[str, torch.Tensor]:
        """The weights of one rank by name; raises FileError unless they are what the program needs there."""
        if len(self.listed) != program.mesh.size:
            what = f"the manifest lists the weights of {len(self.listed)} ranks, the mesh has {program.mesh.size}"
            raise FileError(what, where=str(self.path), remedy=REMAKE)
        found, coordinate = archive.load_rank(self.path, rank), list(program.mesh.coordinates())[rank]
        layouts = layouts_in_files(program)
        for name, (shape, dtype) in weights_needed(program).items():
            want, have = local_shape(shape, layouts[name], program.mesh.shape, coordinate), found.get(name)
            if have is None or (tuple(have.shape), str(have.dtype)) != (tuple(want), dtype):
                said = "is missing" if have is None else f"is {list(have.shape)} of {have.dtype}, not {list(want)} of {dtype}"
                raise FileError(f"in the file of rank {rank}, {name} {said}", where=str(self.path), remedy=REMAKE)
        return found

    def on_mesh(self, program: ShardedProgram, device_mesh: DeviceMesh, device: torch.device) -> dict[str, torch.Tensor]:
        """The weights as this rank of ``device_mesh`` holds them: parameters are DTensors. Reads its file only."""
        coordinate = tuple(device_mesh.get_coordinate() or ())
        held = self.local(program, list(program.mesh.coordinates()).index(coordinate))
        layouts, parameters = layouts_in_files(program), {end.name for end in program.inputs if end.kind == "parameter"}
        shapes = weights_needed(program)
        return {
            name: as_dtensor(value.to(device), device_mesh, layouts[name], shapes[name][0]) if name in parameters else value
            for name, value in held.items()
        }

    def whole(self, program: ShardedProgram) -> dict[str, torch.Tensor]:
        """The whole weights, put together from the files of all ranks."""
        held = {c: self.local(program, rank) for rank, c in enumerate(program.mesh.coordinates())}
        layouts = layouts_in_files(program)
        return {
            name: gather({c: one[name] for c, one in held.items()}, layouts[name], shape, program.mesh)
            for name, (shape, _) in weights_needed(program).items()
        }
