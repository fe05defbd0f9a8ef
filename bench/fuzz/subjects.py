"""The files that are mutated, their readers, and what counts as equal."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxshard
from bench.fuzz.mutations import changed_archive, changed_json, damaged
from fxshard.cli import solve_file
from fxshard.mesh import hardware_file
from fxshard.program.sharded_program import ShardedProgram
from fxshard.solver import PlacementProblem

Files = Mapping[str, bytes]
Mutation = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Subject:
    """Files by their names in a folder, of which the one called ``path`` is read.

    ``mutations``: (share, mutation, whether the reader must notice every change). ``read``: a path to its contents, ``text``: all that
    counts of these, ``write``: contents to a path.
    """

    kind: str
    files: Files
    path: str
    mutations: tuple[tuple[int, Mutation, bool], ...]
    read: Callable[[Path], Any]
    text: Callable[[Any], str]
    write: Callable[[Any, Path], None]

    def mutated(self, draw: random.Random) -> tuple[dict[str, bytes], bool]:
        """(the files with one of them changed, whether what is read must equal the original)."""
        name = draw.choice(sorted(self.files))
        _, mutation, exact = draw.choices(self.mutations, [share for share, _, _ in self.mutations])[0]
        return {**self.files, name: mutation(draw, self.files[name])}, exact


class Small(nn.Module):
    """Two products and a norm, with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.norm(self.first(x)).relu().split(2, dim=1)
        return self.last(torch.cat(parts, 1)).softmax(-1)


MESH = {"dp": 2, "tp": 2}


def subjects(folder: Path) -> dict[str, list[Subject]]:
    """By kind; ``folder`` is for what is written on the way."""
    logging.getLogger("fxshard").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, x, mesh = Small(), torch.randn(4, 4), fxshard.Mesh(MESH, hardware="h100")
    found = [_program(folder, "static.pt2", fxshard.export(model, (x,), mesh, pins={"first.weight": "RS(0)"}, input_layouts="S(0)R"))]
    sizes = fxshard.export(model, (x,), mesh, pins={"first.weight": "RS(0)"}, input_layouts="S(0)R", dynamic_shapes=({0: "batch"},))
    found.append(_program(folder, "dynamic.pt2", sizes))
    plan = fxshard.plan(model, (x,), mesh, pins={"first.weight": "RS(0)"}, memory_limit="1GB", dynamic_shapes=({0: "batch"},))
    found.append(_json("plan", plan.to_json().encode(), fxshard.ShardingPlan.load, lambda p: p.to_json(), lambda p, path: p.save(path)))
    found += _checkpoints(folder)
    for name in ("h100", "cpu"):
        hardware_file.save(hardware_file.find_hardware(name), folder / "h.json")
        data = (folder / "h.json").read_bytes()
        found.append(_json("hardware", data, hardware_file.load, lambda h: repr(h), hardware_file.save))
    found += _problems(folder)
    return {kind: [one for one in found if one.kind == kind] for kind in dict.fromkeys(one.kind for one in found)}


def _program(folder: Path, name: str, program: Any) -> Subject:
    program.save(folder / name)
    mutations = ((1, damaged, True), (3, changed_archive, False))
    return Subject(
        "program", {name: (folder / name).read_bytes()}, name, mutations, fxshard.load, program_text, lambda p, path: p.save(path)
    )


def program_text(program: Any) -> str:
    """Everything that a program's file holds."""
    said = [repr(getattr(program, f.name)) for f in dataclasses.fields(ShardedProgram) if f.name not in ("modules", "plan", "effects")]
    return "\n".join([program.hash, program.plan.to_json(), *said, *(f"{name} {_digest(w)}" for name, w in program.weights.items())])


def _digest(value: torch.Tensor) -> str:
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{list(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"


def _json(kind: str, data: bytes, read: Any, text: Any, write: Any) -> Subject:
    return Subject(kind, {"file.json": data}, "file.json", ((1, damaged, False), (3, changed_json, False)), read, text, write)


def _checkpoints(folder: Path) -> list[Subject]:
    """A folder of ours, one file of whole tensors, and a folder of torch.distributed.checkpoint."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    found = []
    for name, form in (("folder", "safetensors"), ("one.safetensors", "safetensors"), ("dcp", "dcp")):
        with contextlib.suppress(FileExistsError):
            fxshard.save_checkpoint(folder / name, model, optimizer, extra={"step": 3, "b": b"x", "t": torch.ones(2)}, format=form)  # type: ignore[arg-type]
        place = folder / name
        paths = [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        mutations = ((2, damaged, form != "dcp"), (1, _changed_index, False))
        found.append(Subject("checkpoint", files, name, mutations, _restored, json.dumps, _rewritten))
    return found


def _changed_index(draw: random.Random, data: bytes) -> bytes:
    """Fields of the index with its hash made right again; other files are damaged."""
    if not data.startswith(b"{"):
        return damaged(draw, data)
    text = changed_json(draw, data)
    with contextlib.suppress(ValueError, AttributeError, TypeError, KeyError, RecursionError):
        said = json.loads(text)
        said.pop("sha256")
        from fxshard.files import write_json

        return write_json({"sha256": hashlib.sha256(write_json(said).encode()).hexdigest(), **said}).encode()
    return text


def _restored(path: Path) -> list[str]:
    """What a fresh model, its optimiser and the caller get."""
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    extra = fxshard.load_checkpoint(path, model, optimizer)
    state = optimizer.state_dict()
    values = {**model.state_dict(), **{f"{i}.{k}": v for i, one in state["state"].items() for k, v in one.items()}}
    said = [f"{name} {_digest(v) if isinstance(v, torch.Tensor) else v}" for name, v in sorted(values.items())]
    return [*said, repr(state["param_groups"]), repr(extra)]


def _rewritten(said: list[str], path: Path) -> None:
    """What was restored is in no file any more: the lists are compared as they are."""
    path.write_text(json.dumps(said))


def _problems(folder: Path) -> list[Subject]:
    nodes = {"intervals": [[0, 2], [1, 3], [2, 3]], "costs": [[1, 2], [3, 4], [5]], "usages": [[1, 2], [3, 4], [5]]}
    edges = {"nodes": [[0, 1], [1, 2]], "costs": [[1, 2, 3, 4], [5, 10**18]]}
    problem = {"problem": {"name": "small", "nodes": nodes, "edges": edges, "usage_limit": 20}}
    (folder / "p.json").write_text(json.dumps(problem))
    read: PlacementProblem = solve_file.read(folder / "p.json")
    read.write(folder / "p.json.gz")
    found = [_json("solver", (folder / "p.json").read_bytes(), solve_file.read, _problem_text, lambda p, path: p.write(path))]
    packed = {"p.json.gz": (folder / "p.json.gz").read_bytes()}
    mutations = ((1, damaged, False), (2, _changed_gzip, False))
    return [*found, dataclasses.replace(found[0], files=packed, path="p.json.gz", mutations=mutations)]


def _changed_gzip(draw: random.Random, data: bytes) -> bytes:
    import gzip

    inner = gzip.decompress(data)
    hostile = (b"[" * 10**6, bytes(2**21), b'{"problem": ' + b" " * 10**6)
    return gzip.compress(draw.choice(hostile) if draw.randrange(8) == 0 else changed_json(draw, inner))


def _problem_text(problem: PlacementProblem) -> str:
    return repr([getattr(problem, f.name) for f in dataclasses.fields(problem)])
