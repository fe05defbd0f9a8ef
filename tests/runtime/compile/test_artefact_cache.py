"""The cache of compiled code: a hit gives the same bits without compilation, whatever affects code is in the key, damage is repaired."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import decomposition
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard import disk_cache
from fxshard._torch_compat.inductor import code_cache
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision
from fxshard.passes.trace.trace import trace
from fxshard.runtime.compile import artefact_cache, compile
from fxshard.runtime.rank_graph.bind import BoundProgram, bind


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets one entry each time that Inductor compiles forward and backward."""
    counted: list[int] = []
    real = compile._compile_halves
    monkeypatch.setattr(compile, "_compile_halves", lambda *args: counted.append(1) or real(*args))
    return counted


def bound_program(
    mesh: DeviceMesh, pin: str = "S(0)", rows: int = 4, precision: MixedPrecision | None = None, rng: str = "fxshard", draws: bool = True
) -> BoundProgram:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5) if draws else nn.Sigmoid())
    graph = trace(model, (torch.ones(rows, 6),), mixed_precision=precision)
    plan = plan_graph(graph, parse_mesh("tp=2"), Request(pins={"0.weight": pin}, cache=False))
    return bind(lower_plan(graph, plan, False, rng), mesh)


def step(bound: BoundProgram, **options: Any) -> list[torch.Tensor]:
    """Outputs and gradients of a step, as in a process that has compiled nothing yet."""
    compile._ARTEFACTS.clear()
    made = compile.compile_program(bound, **options)
    values = torch.Generator().manual_seed(0)
    ends = [n for n in bound.module.graph.nodes if n.op == "placeholder"][: len(bound.program.inputs)]
    kinds = {end.node: end.kind for end in bound.program.inputs}
    metas = [n.meta["val"] for n in ends if kinds[n.name] != "tangent"]
    inputs = [torch.randn(m.shape, generator=values) if m.dtype.is_floating_point else torch.zeros(m.shape, dtype=m.dtype) for m in metas]
    for x in inputs:
        x.requires_grad_(x.dtype.is_floating_point)
    (out, *_) = made(inputs)
    out.sum().backward()
    assert "forward" not in str(made.artefact.graphs[0].graph) and len(made.artefact.graphs) == 2
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.fixture
def cache_folder(cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache; Inductor's own cache is in a folder next to it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return cache_folder


@pytest.mark.parametrize("expanded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_restart_does_not_compile_again(
    mesh: DeviceMesh, cache_folder: Path, compiled: list[int], expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random operators that are expanded to arithmetic take Inductor seconds."""
    if not expanded:
        monkeypatch.setattr(compile, "expand_draws", lambda module: 0)
    bound = bound_program(mesh)
    without = step(bound, cache=False)
    assert not cache_folder.exists() and len(compiled) == 1
    first = step(bound)
    (file,) = cache_folder.iterdir()
    assert file == artefact_cache.file_for(bound) and len(compiled) == 2
    again = step(bound_program(mesh))
    assert len(compiled) == 2 and len(first) > 2
    for one, two, three in zip(without, first, again, strict=True):
        assert torch.equal(one, two) and torch.equal(two, three)
    step(bound, dump=cache_folder / "dump")
    assert len(compiled) == 3, "with a dump all stages run"


def test_whatever_affects_code_changes_the_key(mesh: DeviceMesh, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_program(mesh)
    same = artefact_cache.file_for(bound)
    assert same is not None and same.parent == cache_folder and same == artefact_cache.file_for(bound_program(mesh))
    others: list[dict[str, Any]] = [{"pin": "S(1)"}, {"pin": "R"}, {"rows": 8}, {"rng": "torch"}]
    others.append({"precision": MixedPrecision(torch.bfloat16)})
    names = {same, *(artefact_cache.file_for(bound_program(mesh, **other)) for other in others)}
    assert len(names) == 1 + len(others)
    for owner, name, value in (
        (disk_cache, "code_digest", lambda: "other sources of fxshard"),
        (disk_cache, "all_user_rules", lambda: {"mylib.op": "a -> a"}),
        (code_cache, "torch_sources", lambda: ("other sources of torch",)),
        (torch, "__version__", "9.9"),
        (torch, "get_num_threads", lambda: 77),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            names.add(artefact_cache.file_for(bound))
    for change in (inductor_config.patch(max_fusion_size=3), functorch_config.patch(activation_memory_budget=0.5)):
        with change:
            names.add(artefact_cache.file_for(bound))
    assert len(names) == 1 + len(others) + 7 and None not in names
    assert artefact_cache.file_for(bound) == same


def test_code_with_unknown_dependencies_is_not_cached(mesh: DeviceMesh, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_program(mesh)
    monkeypatch.setitem(decomposition.decompositions, "an operator", test_code_with_unknown_dependencies_is_not_cached)
    assert artefact_cache.file_for(bound) is None, "a decomposition of the user"
    monkeypatch.undo()
    for patch in ({"force_disable_caches": True}, {"post_grad_custom_pre_pass": lambda graph: None}, {"triton.cudagraphs": True}):
        with inductor_config.patch(patch):
            assert artefact_cache.file_for(bound) is None, patch
    assert artefact_cache.file_for(bound) is None, "FXSHARD_CACHE is 0 for all tests"
    with torch.library._scoped_library("artefacts", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        graph = trace(_Twice(), (torch.ones(4, 4),), train=False)
        plan = plan_graph(graph, parse_mesh("tp=2"), Request(cache=False, train=False))
        monkeypatch.setenv("FXSHARD_CACHE_DIR", str(cache_folder))
        monkeypatch.setenv("FXSHARD_CACHE", "1")
        assert artefact_cache.file_for(bound) is not None
        assert artefact_cache.file_for(bind(lower(graph, plan), mesh)) is None, "an operator of the user"


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.ops.artefacts.twice(x) + 1


@pytest.mark.parametrize("damage", ["cut", "foreign", "changed", "no code", "bad code"])
def test_damage_is_logged_and_repaired(
    mesh: DeviceMesh, cache_folder: Path, compiled: list[int], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    bound = bound_program(mesh, draws=False)  # without random operators, which take Inductor seconds
    first = step(bound)
    (file,) = cache_folder.iterdir()
    text, code = file.read_text(), cache_folder.parent / "inductor" / "fxgraph"
    texts = {"cut": text[:30], "foreign": "{}", "changed": re.sub('"kept_inputs": .*,', '"kept_inputs": [7],', text)}
    file.write_text(texts.get(damage, text))
    if damage == "no code":
        shutil.rmtree(code)
    for entry in code.rglob("*") if damage == "bad code" else ():
        if entry.is_file():
            entry.write_bytes(b"no pickle")
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert all(map(torch.equal, step(bound), first))
    assert len(compiled) == 2 and file.read_text() == text
    assert ("is made again" in caplog.text) == (damage in texts)
    assert all(map(torch.equal, step(bound), first))
    assert len(compiled) == 2, "the repaired file serves the next process"


def test_graphs_with_data_dependent_sizes_are_not_cached() -> None:
    known = []
    for make in (lambda env: 5, lambda env: env.create_unbacked_symint()):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        graph = fx.Graph()
        node = graph.placeholder("x")
        with mode:
            node.meta["val"] = torch.empty(make(mode.shape_env), 3)
        graph.output((node,))
        known.append(artefact_cache._node_texts(fx.GraphModule(nn.Module(), graph)) is not None)
    assert known == [True, False]
