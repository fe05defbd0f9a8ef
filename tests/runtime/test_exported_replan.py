"""A program whose file holds the planning graph runs on any mesh; others say how to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from examples.llama import Llama
from fxshard.cli import main as cli
from fxshard.cli.console.exit_codes import USER_ERROR
from fxshard.errors import FileError, PlanError, SizesError
from tests.archive.hostile import edited
from tests.cli.test_run import exported, same
from tests.distributed.fresh import run_fresh
from tests.runtime.test_exported_training import Regression, made

MESHES: list[dict[str, int]] = [{"tp": 3}, {"dp": 2, "tp": 2, "pp": 2}, {"x": 1}]
OPTIONS: dict[str, Any] = {"pins": {"layers.*.attention.w[qkv].weight": "RS(0)"}, "replan": True}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, tokens = Llama.small(layers=1).double(), torch.randint(0, 256, (5, 8))
    path = tmp_path_factory.mktemp("replan") / "m.pt2"
    fxshard.export(model, (tokens,), fxshard.Mesh({"dp": 2, "tp": 2}), **OPTIONS).save(path)
    return path, model, tokens


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_llama_on_other_meshes(llama: tuple[Path, nn.Module, torch.Tensor], axes: dict[str, int], tmp_path: Path) -> None:
    path, model, tokens = llama
    program = fxshard.load(path)
    assert program.planning is not None and program.planning.graph.hash == program.plan.graph_hash
    pins = {"layers.*.attention.wq.weight": "S(0)" + "R" * (len(axes) - 1)}
    other = program.replan(fxshard.Mesh(axes), pins=pins)
    assert other.plan.graph_hash == program.plan.graph_hash and (other.mesh.size == 1 or other.collectives)
    with torch.no_grad():
        torch.testing.assert_close(fxshard.simulate(other, (tokens,)).outputs, model(tokens), rtol=1e-9, atol=1e-9)
    other.save(tmp_path / "again.pt2")
    assert fxshard.load(tmp_path / "again.pt2").replan(program.mesh).mesh == program.mesh


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_training_programs(tmp_path: Path, optimizer: Any) -> None:
    model, batches = made()
    mesh = fxshard.Mesh({"dp": 2})
    fxshard.export(model, batches[0], mesh, train=True, optimizer=optimizer, replan=True).save(tmp_path / "t.pt2", "per-rank")
    program = fxshard.load(tmp_path / "t.pt2").replan(fxshard.Mesh({"tp": 4}), pins={"up.weight": "S(0)"})
    result = fxshard.simulate(program, batches[0])
    loss = model(*batches[0])
    torch.testing.assert_close(result.outputs, loss.detach(), rtol=1e-9, atol=1e-9)
    if optimizer is None:
        loss.backward()
        torch.testing.assert_close(result.grads["up.weight"], model.up.weight.grad, rtol=1e-9, atol=1e-9)
    else:
        assert "optimizer.up.weight.exp_avg" in result.mutations


def test_without_the_planning_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = exported(tmp_path, "inside")
    with pytest.raises(PlanError, match=r"holds no planning graph.*runs on mesh dp=2,tp=2 only") as caught:
        fxshard.load(program).replan(fxshard.Mesh({"tp": 3}))
    assert "replan=True (--replan)" in str(caught.value)
    run = ["run", str(program), "--simulate", "--inputs", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")]
    assert cli.main([*run, "--mesh", "tp=3"]) == USER_ERROR
    assert "--replan" in capsys.readouterr().err
    exported(tmp_path, "inside", "--replan")
    assert cli.main([*run, "--mesh", "tp=3"]) == 0
    same(tmp_path)


def test_refused(tmp_path: Path) -> None:
    model, batches = made()
    path = tmp_path / "m.pt2"
    for change, what in (
        (lambda p: p.update(rng="dice"), "no source of random numbers"),
        (lambda p: p.update(train=True, without=["sleep"]), "does not hold together"),
        (lambda p: p["meta"].update(nothing="is_forward"), "has no node 'nothing'"),
        (lambda p: p["unreduced"].append("x"), "not the one that the plan is for"),
    ):
        fxshard.export(model.eval(), batches[0], fxshard.Mesh({"dp": 2}), replan=True).save(path)
        with pytest.raises(FileError, match=what):
            fxshard.load(edited(path, "extra/fxshard/planning.json", change))


class Cached(nn.Module):
    """A mask over a cache and a new row: the size of one is that of the other and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, cache: torch.Tensor, new: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.up(torch.cat((cache, new)) * mask[:, None]).softmax(0)


def test_dynamic_sizes(tmp_path: Path) -> None:
    """A program for every size on other meshes, again through a file; a file whose graph needs a guard that it does not say is refused."""
    model, path = Cached().double(), tmp_path / "m.pt2"

    def call(rows: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(rows, 6).double(), torch.randn(1, 6).double(), torch.rand(rows + 1).double()

    sizes = ({0: torch.export.Dim("rows", max=20)}, {}, {0: "all"})
    fxshard.export(model, call(7), fxshard.Mesh({"dp": 2, "tp": 2}), replan=True, dynamic_shapes=sizes).save(path)
    for axes in ({"tp": 3}, {"x": 1}):
        program = fxshard.load(path).replan(fxshard.Mesh(axes), pins={"up.weight": "S(0)"})
        assert [one.name for one in program.sizes] == ["rows", "all"]
        assert bool(program.collectives) == (program.mesh.size > 1)
        program.save(path)
        for rows in (7, 4, 13):
            args = call(rows)
            torch.testing.assert_close(fxshard.simulate(program, args).outputs, model(*args).detach(), rtol=1e-9, atol=1e-9)
        with pytest.raises(SizesError, match="rows is 21"):
            fxshard.simulate(program, call(21))
    changes: list[tuple[Any, str]] = [
        (lambda said: said["guards"].clear(), "takes for granted|not the one that the plan is for"),
        (lambda said: said["sizes"][0].update(most=30), "not the one that the plan is for"),
        (lambda said: said["sizes"].__delitem__(1), "a guard is a condition on sizes that the program has"),
        (lambda said: said["sizes"][1].update(example=9), "the sizes of the example break"),
    ]
    for change, what in changes:
        program.save(path)
        with pytest.raises(FileError, match=what):
            fxshard.load(edited(path, "extra/fxshard/planning.json", change))


@pytest.mark.distributed
def test_ranks_of_another_mesh(tmp_path: Path) -> None:
    """A file for four ranks, bound by two; one without the planning graph says what to do."""
    torch.manual_seed(0)
    model, x, y = Regression().double().eval(), torch.randn(4, 6).double(), torch.randn(4, 3).double()
    for name, replan in (("with", True), ("without", False)):
        fxshard.export(model, (x, y), fxshard.Mesh({"dp": 2, "tp": 2}), replan=replan).save(tmp_path / f"{name}.pt2", "per-rank")
    save_file({"x": x, "y": y}, tmp_path / "inputs.safetensors")
    body = """
given = load_file(folder + "/inputs.safetensors")
out = {"loss": fxshard.load(folder + "/with.pt2").bind(mesh, compiler="eager")(given["x"], given["y"])}
try:
    fxshard.load(folder + "/without.pt2").bind(mesh)
except fxshard.errors.PlanError as error:
    assert "replan=True" in str(error), error
else:
    raise AssertionError("bound to another mesh")
"""
    run_fresh(body, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load_file(tmp_path / "out1.safetensors")["loss"], model(x, y), rtol=1e-9, atol=1e-9)
