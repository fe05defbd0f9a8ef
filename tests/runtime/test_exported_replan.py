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
from fxshard.errors import FileError, OptionError, PlanError
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
    with pytest.raises(OptionError, match="dynamic sizes cannot be planned again"):
        fxshard.export(model, batches[0], fxshard.Mesh({"dp": 2}), replan=True, dynamic_shapes=({0: "b"}, {0: "b"}))
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
