"""save and load: a program to a file and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from fxshard.archive.compiled import CompiledCode, program_hash, read_compiled
from fxshard.archive.container import NOT_A_PROGRAM, PLAN, PROGRAM, WEIGHTS, Container, Listed, graph_entry, graph_name, open_archive, write
from fxshard.archive.description import read_description, write_description
from fxshard.archive.graphs import read_graph, write_graph
from fxshard.archive.planning import Planning, read_planning, write_planning
from fxshard.archive.weights import read_rank_file, read_weights, select_weights, weights_file, weights_needed, write_rank_files
from fxshard.errors import FileError
from fxshard.plans.plan_json import dumps
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram


def save(
    program: ShardedProgram,
    path: str | Path,
    weights: Mapping[str, torch.Tensor] | None = None,
    shards: Iterable[Mapping[str, torch.Tensor]] = (),
    planning: Planning | None = None,
    compiled: CompiledCode | None = None,
) -> None:
    """Writes ``program`` to ``path`` (``.pt2``) atomically; the same program gives the same bytes.

    Args:
        weights: whole parameters and buffers by the model's names (its state_dict); those that the program does not read are
            left out, tied ones are stored once. None: a program without weights.
        shards: instead, what each rank holds of them; each is written to a file of its own beside ``path``, atomically, before
            the program: if the process ends in between, a program that was there before refuses the new files by their hashes.
        planning: what the program was planned from, so that it can be planned for other meshes.
        compiled: its code, if it was compiled ahead of time.

    Raises:
        FileError: the path cannot be written, a weight is missing or does not match the program's, or a file cannot hold
            some part of the program.
    """
    names = {size_class: graph_name(number) for number, size_class in enumerate(program.modules)}
    graphs = {names[size_class]: write_graph(module, (*program.sizes, *program.ranks)) for size_class, module in program.modules.items()}
    own = {PLAN: dumps(program.plan).encode(), PROGRAM: write_description(program, names).encode()}
    own |= {} if planning is None else write_planning(program, planning)
    own |= {} if compiled is None else compiled.entries()
    kept = None if weights is None else select_weights(program, weights)
    with weights_file(kept, Path(path).parent) as file:
        write(path, own, graphs, file, write_rank_files(path, shards))


@dataclass(frozen=True)
class Contents:
    """All that a program's file holds: the weights by the model's names, those of ranks in files of their own (``rank_files``), what the
    program was planned from, and its compiled code."""

    program: ShardedProgram
    weights: Mapping[str, torch.Tensor]
    rank_files: tuple[Listed, ...]
    planning: Planning | None
    compiled: CompiledCode | None


def load_all(path: str | Path) -> Contents:
    """Reads everything in a program's file. Raises FileError as ``load``."""
    with open_archive(path) as container:
        program = _read_program(container)
        weights = read_weights(container) if container.has(WEIGHTS) else {}
        if extra := set(weights) - set(weights_needed(program)):
            raise FileError(
                f"the file holds a weight {min(extra)!r}, which its program does not read", where=str(path), remedy=NOT_A_PROGRAM
            )
        return Contents(program, weights, container.rank_files, read_planning(container, program), read_compiled(container, program))


def load(path: str | Path) -> ShardedProgram:
    """Reads a program without its weights; needs neither a process group nor the model's source.

    Compiled code needs no graphs: of a program that has some, and no dynamic sizes, they are read when they are asked for.

    Raises FileError, with a reason, if the file is damaged, truncated, foreign, of another version, or contains anything that a program
    does not. The file is data: nothing in it is unpickled or executed.
    """
    with open_archive(path) as container:
        return _read_program(container)


def _read_program(container: Container) -> ShardedProgram:
    where = f"{container.path}: {{}}".format
    plan = ShardingPlan.from_json(container.read(PLAN), where("plan"))
    description = read_description(container.read(PROGRAM), where("program"))
    container.check_entries(description.graphs)
    mesh, sizes = description.mesh, description.sizes
    container.check_rank_files(mesh.size)
    axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    texts = {name: container.read(graph_entry(name)) for name in description.graphs}

    def read() -> dict[str, fx.GraphModule]:
        return {name: read_graph(text, where(name), axes, sizes) for name, text in texts.items()}

    said = program_hash(container)
    return description.program(plan, read()) if said is None or sizes.sizes else description.later(plan, read, said)


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The whole weights in a program's file by the model's names, tied ones once; memory-mapped, so that only what is used is read.

    Raises FileError if the program has none or they are damaged.
    """
    with open_archive(path) as container:
        if not container.has(WEIGHTS):
            raise FileError("the program holds no weights", where=str(path), remedy="pass them when it is bound, or export with weights")
        return read_weights(container)


def load_rank(path: str | Path, rank: int) -> dict[str, torch.Tensor]:
    """What one rank holds of the weights, from its file beside the program, by the model's names; memory-mapped. Raises FileError."""
    with open_archive(path) as container:
        return read_rank_file(container, rank)
