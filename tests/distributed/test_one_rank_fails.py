"""What one of two gloo ranks raises when a program is bound, the other raises at once, and the ranks can meet again afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fxshard
from tests.distributed.fresh import run_fresh
from tests.runtime.test_exported_training import Regression

RANKS = """
from fxshard.errors import FileError, RunError
exported = fxshard.runtime.exported
real = {name: getattr(exported, name) for name in ("plan_graph", "lower_plan")}

def failing(*args, **kwargs):
    raise ValueError("failed here")

def raised(name, patched=(), of=lambda rank: folder):
    for one in real:
        setattr(exported, one, failing if one in patched else real[one])
    try:
        fxshard.load(f"{of(rank)}/{name}.pt2").bind(mesh, compiler="eager", timeout=600)
    except Exception as error:
        return error

error = raised("apart", of=lambda rank: f"{folder}/{rank}")
assert isinstance(error, FileError if rank else RunError), error
assert rank or "rank 1 could not bind the program: " in str(error) and "rank-00001.safetensors" in str(error), error

error = raised("replan", () if rank else ("plan_graph",))
assert isinstance(error, RunError if rank else ValueError), error
assert not rank or "rank 0 could not plan: ValueError: " in str(error) and "failed here" in str(error), error

error = raised("replan", ("lower_plan",) if rank else ())
assert isinstance(error, ValueError if rank else RunError), error
assert rank or "rank 1 could not plan the program for its mesh: ValueError: failed here" in str(error), error

assert raised("replan", ("plan_graph",) if rank else ()) is None, "the other rank planned too"
exported.plan_graph = real["plan_graph"]
given = load_file(folder + "/inputs.safetensors")
out = {"loss": fxshard.load(folder + "/0/apart.pt2").bind(mesh, compiler="eager")(given["x"], given["y"])}
"""


@pytest.mark.distributed
def test_both_ranks_raise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Regression().double().eval(), torch.randn(4, 6).double(), torch.randn(4, 3).double()
    (tmp_path / "0").mkdir()
    fxshard.export(model, (x, y), fxshard.Mesh({"tp": 2})).save(tmp_path / "0/apart.pt2", "per-rank")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (tmp_path / "1/apart.pt2.rank-00001.safetensors").unlink()
    fxshard.export(model, (x, y), fxshard.Mesh({"dp": 2, "tp": 2}), replan=True).save(tmp_path / "replan.pt2")
    save_file({"x": x, "y": y}, tmp_path / "inputs.safetensors")
    run_fresh(RANKS, tmp_path)
    with torch.no_grad():
        for rank in range(2):
            torch.testing.assert_close(load_file(tmp_path / f"out{rank}.safetensors")["loss"], model(x, y), rtol=1e-9, atol=1e-9)
