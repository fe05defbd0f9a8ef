"""The files that are mutated, their readers, and what counts as equal."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn

import fxshard
from bench.fuzz.mutations import changed_archive, changed_function, changed_json, damaged, foreign_call, resealed, unsealed
from bench.fuzz.shown import shown_anyway, shown_plan
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.archive.compiled import GUARDS, WRITTEN, CompiledCode, CompiledModel, bounds_in_words, describe, model_names
from fxshard.archive.graphs import read_graph, write_graph
from fxshard.archive.sizes import write_guards
from fxshard.cli import solve_file
from fxshard.files import write_json
from fxshard.mesh import hardware_file
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.exported import ExportedProgram
from fxshard.runtime.measure.kineto import Trace, read_trace
from fxshard.solver import PlacementProblem

Files = Mapping[str, bytes]
Mutation = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Subject:
    """Files by their names in a folder, of which the one called ``path`` is read.

    ``mutations``: (share, mutation, whether the reader must notice every change). ``read``: a path to its contents, ``text``: all that
    counts of these, ``write``: contents to a path. ``shown``: what is wrong with what ``fxshard inspect`` shows of the path, given whether
    ``read`` refused it.
    """

    kind: str
    files: Files
    path: str
    mutations: tuple[tuple[int, Mutation, bool], ...]
    read: Callable[[Path], Any]
    text: Callable[[Any], str]
    write: Callable[[Any, Path], None]
    shown: Callable[[Path, bool], str] = lambda path, refused: ""

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


class Loss(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().sum()


MESH = {"dp": 2, "tp": 2}
SHARES = {"program": 25, "graph": 15, "flex": 5, "plan": 15, "checkpoint": 15, "hardware": 10, "solver": 10, "trace": 5}
"""Of 100 cases, how many are of each kind."""


def cases(kind: str, total: int) -> int:
    return total * SHARES[kind] // 100


def subjects(folder: Path) -> dict[str, list[Subject]]:
    """By kind; ``folder`` is for what is written on the way."""
    torch.manual_seed(0)
    model, x, mesh = Small(), torch.randn(4, 4), fxshard.Mesh(MESH, hardware="h100")
    found = [_program(folder, "static.pt2", fxshard.export(model, (x,), mesh, pins={"first.weight": "RS(0)"}, input_layouts="S(0)R"))]
    sizes = fxshard.export(model, (x,), mesh, pins={"first.weight": "RS(0)"}, input_layouts="S(0)R", dynamic_shapes=({0: "batch"},))
    found.append(_program(folder, "dynamic.pt2", sizes))
    training = fxshard.export(Loss(), (x,), mesh, train=True, optimizer=torch.optim.SGD, replan=True)
    found.append(_program(folder, "training.pt2", training, "per-rank"))
    found.append(_program(folder, "compiled.pt2", _with_code(fxshard.export(model, (x,), mesh))))
    found.append(_program(folder, "compiled_dynamic.pt2", _with_code(sizes)))
    plan = fxshard.plan(model, (x,), mesh, pins={"first.weight": "RS(0)"}, memory_limit="1GB", dynamic_shapes=({0: "batch"},))
    found += _plans(plan)
    found += _graphs()
    found += _checkpoints(folder)
    for name in ("h100", "cpu"):
        hardware_file.save(hardware_file.find_hardware(name), folder / "h.json")
        data = (folder / "h.json").read_bytes()
        found.append(_json("hardware", data, hardware_file.load, lambda h: repr(h), hardware_file.save))
    found += _problems(folder)
    trace = json.dumps({"traceEvents": _events()}).encode()
    found.append(
        _json("trace", trace, _traced, lambda pair: repr((pair[0].ops, pair[0].collectives)), lambda pair, path: path.write_bytes(pair[1]))
    )
    kinds = {kind: [one for one in found if one.kind == kind] for kind in dict.fromkeys(one.kind for one in found)}
    assert kinds.keys() == SHARES.keys(), "each kind of file has a share of the cases"
    return kinds


def _plans(plan: fxshard.ShardingPlan) -> list[Subject]:
    """A plan that is damaged or edited, and one whose hash was made right again."""

    def text(plan: fxshard.ShardingPlan) -> str:
        return f"{plan}\n{plan.to_json()}"

    edited = ((1, damaged, True), (1, changed_json, False), (2, unsealed, False))
    one = _json("plan", plan.to_json().encode(), fxshard.ShardingPlan.load, text, lambda p, path: p.save(path))
    return [
        dataclasses.replace(one, mutations=edited, shown=shown_plan),
        dataclasses.replace(one, mutations=((1, resealed, False),), shown=shown_anyway),
    ]


def _with_code(program: ExportedProgram) -> ExportedProgram:
    """The program with code of each size class that no machine runs: reading a file must not run it."""
    words = {GUARDS: write_json({"guards": write_guards(program.guards)}), **bounds_in_words(program, program.guards)}
    guards = words if program.sizes else {}
    said = {"AOTI_DEVICE_KEY": "cpu", WRITTEN: "", **describe(program, ()), **guards}
    names = sorted(set(model_names(program).values()))
    models = {name: CompiledModel(b"\x7fELF" + name.encode() * 50, b'{"nodes": []}', said) for name in names}
    return dataclasses.replace(program, compiled=CompiledCode(models, b"\x7fELF, runner" * 30))


def _program(folder: Path, name: str, program: Any, weights: str = "inside") -> Subject:
    program.save(folder / name, weights)
    mutations = ((1, damaged, True), (3, _changed_program, False))
    files = {path.name: path.read_bytes() for path in sorted(folder.glob(f"{name}*"))}

    def write(program: Any, path: Path) -> None:
        program.save(path, weights)

    return Subject("program", files, name, mutations, fxshard.load, program_text, write, shown_anyway)


def _changed_program(draw: random.Random, data: bytes) -> bytes:
    return changed_archive(draw, data) if data.startswith(b"PK") else damaged(draw, data)


def program_text(program: Any) -> str:
    """Everything that a program's file holds."""
    said = [repr(getattr(program, f.name)) for f in dataclasses.fields(ShardedProgram) if f.name not in ("modules", "plan", "effects")]
    planning = program.planning and program.planning.graph.hash
    weights = [f"{name} {_digest(w)}" for name, w in program.whole_weights.items()]
    graphs = [node.format_node() or "" for module in program.modules.values() for node in module.graph.nodes]  # read late
    code = [] if program.compiled is None else [hashlib.sha256(data).hexdigest() for data in program.compiled.entries().values()]
    return "\n".join([str(program), program.hash, program.plan.to_json(), str(planning), *said, *weights, *graphs, *code])


def _graphs() -> list[Subject]:
    """A local graph with operands of several types, one call of which becomes a call of any operator of torch."""
    graph, mode = fx.Graph(), FakeTensorMode()
    operands = [(torch.float32, (4, 6)), (torch.float64, (2, 3, 8, 8)), (torch.int64, (4,)), (torch.bool, (4, 6)), (torch.float32, (6,))]
    for number, (dtype, shape) in enumerate(operands):
        node = graph.placeholder(f"x{number}")
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
    named = {node.name: node for node in graph.nodes}
    call = graph.call_function(torch.ops.aten.where.self, tuple(named[name] for name in ("x3", "x0", "x4")))
    with mode:
        call.meta["val"] = torch.empty(4, 6)
    cat = graph.call_function(torch.ops.aten.cat.default, ([named["x0"], named["x3"]],))
    with mode:
        cat.meta["val"] = torch.empty(8, 6)
    graph.output((call,))
    mutations = ((9, foreign_call, False), (1, changed_json, False))
    return [_graph("graph", graph, mutations), _graph("flex", _flex(), ((9, changed_function, False), (1, changed_json, False)))]


def _flex() -> fx.Graph:
    """A local graph with flex attention, whose two functions are texts in it."""
    graph, mode = fx.Graph(), FakeTensorMode()
    x, table = graph.placeholder("x"), graph.placeholder("table")
    with mode:
        x.meta["val"], table.meta["val"] = torch.empty(2, 2, 8, 4), torch.empty(8, dtype=torch.int64)

    def called(name: str, *args: Any) -> list[Any]:
        return [f"torch.ops.aten.{name}.Tensor", list(args), {"dict": {}}]

    places = [{"node": number} for number in range(7)]
    distance = [called("sub", places[4], places[3]), called("add", places[0], places[5])]
    rows = [called("index", places[4], [place]) for place in places[2:4]]
    score, mask = json.dumps([5, distance, 6]), json.dumps([5, [*rows, called("eq", *places[5:])], 7])
    call = graph.call_function(torch.ops.fxshard.flex_attention.default, (x, x, x, [], [table], None, None, None, score, mask, 0.5))
    with mode:
        call.meta["val"] = torch.empty(2, 2, 8, 4), torch.empty(2, 2, 8), torch.empty(2, 2, 8)
        out = graph.call_function(operator.getitem, (call, 0))
        out.meta["val"] = torch.empty(2, 2, 8, 4)
    graph.output((out,))
    return graph


def _graph(kind: str, graph: fx.Graph, mutations: tuple[tuple[int, Mutation, bool], ...]) -> Subject:
    text = write_graph(fx.GraphModule(nn.Module(), graph))

    def read(path: Path) -> fx.GraphModule:
        return read_graph(path.read_bytes(), path.name, {"dp": 2, "tp": 2})

    def listed(module: fx.GraphModule) -> str:
        return "\n".join(f"{n.format_node()} {n.meta.get('val')}" for n in module.graph.nodes)

    def write(module: fx.GraphModule, path: Path) -> None:
        path.write_bytes(write_graph(module))

    return Subject(kind, {"graph.json": text}, "graph.json", mutations, read, listed, write)


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
            fxshard.save_checkpoint(folder / name, model, optimizer, extra={"step": 3, "b": b"x", "t": torch.ones(2)}, format=form)  # type: ignore[arg-type]  # one of the two names
        place = folder / name
        paths = [place] if place.is_file() else [path for path in sorted(place.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        mutations = ((2, damaged, form != "dcp"), (1, resealed, False))
        found.append(Subject("checkpoint", files, name, mutations, _restored, json.dumps, _rewritten))
    return found


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


def _events() -> list[dict[str, Any]]:
    """A product, an operator that moves bytes, and gathers of two sizes, as Kineto writes them."""
    found: list[dict[str, Any]] = []
    for number, (name, shapes) in enumerate((("aten::mm", [[64, 32], [32, 16]]), ("aten::add", [[1024, 512], [1024, 512]]))):
        about = {"External id": number, "Input Dims": shapes, "Input type": ["float", "float"]}
        found.append({"ph": "X", "cat": "cpu_op", "name": name, "dur": 3, "args": about})
        found.append({"ph": "X", "cat": "kernel", "name": "k", "dur": 2.5, "args": {"External id": number}})
    for count in (2**10, 2**20):
        about = {"Collective name": "_allgather_base", "dtype": "Float", "In msg nelems": count, "Out msg nelems": 4 * count}
        about |= {"Group size": 4, "Process Group Ranks": "[0, 8, 16, 24]"}
        found.append({"ph": "X", "cat": "kernel", "name": "nccl", "dur": 20 + count / 2**14, "args": about})
    return found


def _traced(path: Path) -> tuple[Trace, bytes]:
    """What is read of a trace, and the file."""
    return read_trace(path), path.read_bytes()


def _changed_gzip(draw: random.Random, data: bytes) -> bytes:
    import gzip

    inner = gzip.decompress(data)
    hostile = (b"[" * 10**6, bytes(2**26), b'{"problem": ' + b"[]," * 10**7)
    return gzip.compress(draw.choice(hostile) if draw.randrange(8) == 0 else changed_json(draw, inner))


def _problem_text(problem: PlacementProblem) -> str:
    def plain(value: Any) -> Any:
        return (value + 0.0).tolist() if isinstance(value, np.ndarray) else value  # a minus before a 0 says nothing

    return repr([[plain(one) for one in v] if isinstance(v := getattr(problem, f.name), tuple) else v for f in dataclasses.fields(problem)])
