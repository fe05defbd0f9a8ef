"""The cache of compiled code for dynamic sizes: an entry includes Inductor's guards, and the key every expression of sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxshard import disk_cache
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph, trace_model
from fxshard.runtime.compile import artefact_cache, compile
from fxshard.runtime.rank_graph.bind import BoundProgram, bind
from fxshard.shapes import dynamic_dims


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A mesh, and empty caches of fxshard and Inductor."""
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    dist.init_process_group("fake", rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Rows(nn.Linear):
    """A layer on the first of ``parts`` equal parts of the batch."""

    parts = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: x.shape[0] // self.parts]).relu()


def bound_program(mesh: DeviceMesh, parts: int = 2, rows: int = 8, most: int = 99, uneven: bool = False) -> BoundProgram:
    model, args = Rows(6, 8), (torch.ones(rows, 6),)
    model.parts = parts
    (dim,) = dynamic_dims(model, args, {}, ({0: torch.export.Dim("batch", max=most)},))
    graph = trace_model(Request(model, args, {}, True, dynamic=(replace(dim, uneven=uneven),)), parse_mesh("tp=2"), False)
    layouts = {"input_layouts": "R", "output_layouts": "S(0)", "pins": {"weight": "R", "bias": "R"}}
    return bind(lower_plan(graph, plan_graph(graph, parse_mesh("tp=2"), Request(cache=False, **layouts)), False), mesh)


def compiled(bound: BoundProgram, **options: Any) -> Any:
    """Compiles ``bound`` as in a process that has compiled nothing yet."""
    compile._ARTEFACTS.clear()
    return compile.compile_program(bound, **options)


def stepped(made: Any, *sizes: int) -> list[torch.Tensor]:
    """Outputs and gradients at these batch sizes."""
    found = []
    for size in sizes:
        values = torch.Generator().manual_seed(size)
        inputs = [torch.randn(shape, generator=values) for shape in ((8, 6), (8,), (size, 6))]
        weights = [x.requires_grad_() for x in inputs[:2]]
        (out,) = made(inputs, [size // made.program.sizes[0].unit])
        found += [out.detach(), *torch.autograd.grad(out.square().sum(), weights)]
    return found


def served(made: Any) -> list[int]:
    """The batch sizes below 30 that the compiled code accepts."""
    return [size for size in range(1, 30) if all(g.holds({"batch": size}) for g in made.guards) and size % made.program.sizes[0].unit == 0]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "any"])
def test_a_restart_does_not_ask_inductor(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, uneven: bool) -> None:
    sizes = (8, 12, 20)
    first = compiled(bound_program(mesh, uneven=uneven))
    counted = dict(counters["inductor"])
    by_torch = compiled(bound_program(mesh, uneven=uneven), cache=False)
    assert counters["inductor"]["fxgraph_cache_miss"] == counted["fxgraph_cache_miss"]
    assert served(by_torch) == served(first), "code from Inductor's cache has the guards of the compilation"
    monkeypatch.setattr(compile, "_compile_halves", lambda *args: pytest.fail("Inductor was asked"))
    again = compiled(bound_program(mesh, uneven=uneven))
    assert {g.condition for g in again.guards} == {g.condition for g in first.guards}
    assert served(again) == served(first) and set(sizes) <= set(served(first))
    assert counters["inductor"]["fxgraph_cache_miss"] == counted["fxgraph_cache_miss"]
    assert all(map(torch.equal, stepped(again, *sizes), stepped(first, *sizes)))


def test_each_property_of_sizes_changes_the_key(mesh: DeviceMesh) -> None:
    known = artefact_cache.file_for(bound_program(mesh))
    assert known is not None and known == artefact_cache.file_for(bound_program(mesh))
    others = [{"parts": 4}, {"rows": 16}, {"most": 50}, {"uneven": True}]
    names = {known, *(artefact_cache.file_for(bound_program(mesh, **other)) for other in others)}
    assert len(names) == 1 + len(others) and None not in names


def test_another_expression_in_one_value_changes_the_key(mesh: DeviceMesh) -> None:
    bound = bound_program(mesh)
    before = artefact_cache._node_texts(bound.module)
    node = next(n for n in bound.module.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor))
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(value.shape[0] + 2 * bound.program.sizes[0].value, *value.shape[1:])
    assert before is not None and artefact_cache._node_texts(bound.module) != before


def test_an_entry_with_other_guards_is_not_used(mesh: DeviceMesh) -> None:
    bound = bound_program(mesh, uneven=True)
    assert bound.program.sizes[0].value > 3, "this comparison makes torch record a guard"
    first = compiled(bound)
    assert min(served(first)) > 3
    path = artefact_cache.file_for(bound)
    assert path is not None and artefact_cache.read(path, bound.program.sizes) is not None
    text = path.read_text().partition("\n")[2]
    said = json.loads(text)
    assert said["guards"] and all(said["conditions"])
    other = json.dumps({**said, "conditions": ["0" * 64, said["conditions"][1]]})
    disk_cache.write(path, "the key", lambda: other)
    assert artefact_cache.read(path, bound.program.sizes) is None, "Inductor's guards differ"
    path.write_text(path.read_text().replace(said["conditions"][1], "0" * 64))
    assert artefact_cache.read(path, bound.program.sizes) is None, "the digest differs"
    assert served(compiled(bound)) == served(first) and path.read_text().endswith(text)
