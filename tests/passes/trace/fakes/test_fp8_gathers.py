"""``MixedPrecision(gathers="fp8")``: plans price gathers of weights at a byte per element, and cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fxshard
from fxshard.cli import main as cli
from fxshard.errors import OptionError
from fxshard.mesh.mesh import Mesh

BF16, FP8 = (fxshard.MixedPrecision(torch.bfloat16, torch.float32, gathers=how) for how in (None, "fp8"))
PINS = {"*.weight": "S(0)", "*.bias": "S(0)"}
MODEL = """
import torch
from torch import nn

def training():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)), (torch.ones(16384, 2048),)
"""


def made() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (torch.ones(512, 64),)


def planned(precision: fxshard.MixedPrecision, objective: str = "communication") -> fxshard.ShardingPlan:
    options = {"input_layouts": "S(0)", "pins": PINS, "objective": objective, "cache": False}
    return fxshard.plan(*made(), Mesh({"dp": 4}, "h100"), mixed_precision=precision, **options)


def test_weights_are_gathered_at_a_byte_per_element() -> None:
    """A rank sends 3/4 of each gathered weight, or of its bfloat16 form; biases stay in bfloat16, gradients in float32."""

    def sent(plan: fxshard.ShardingPlan, kind: str, dims: int) -> list[int]:
        return [c.bytes for c in plan.collectives if c.kind == kind and len(c.buffer) == dims]

    wide, narrow = planned(BF16), planned(FP8)
    assert sent(wide, "all_gather", 2) == [2 * 64 * 64 * 3 // 4] * 2 and sent(narrow, "all_gather", 2) == [64 * 64 * 3 // 4] * 2
    for kind, dims in (("all_gather", 1), ("reduce_scatter", 2), ("reduce_scatter", 1)):
        assert sent(wide, kind, dims) == sent(narrow, kind, dims) != []
    assert "gathered in fp8" in str(narrow) and "gathered in fp8" not in str(wide)
    assert fxshard.ShardingPlan.from_json(narrow.to_json()) == narrow
    casts = [node.compute for node in planned(FP8, "time").nodes if "float8_e4m3fn" in node.dtypes]
    assert len(casts) == 2 and all(casts)


def test_they_cannot_be_run() -> None:
    model, args = made()
    plan = planned(FP8)
    for run in (
        lambda: fxshard.lower(model, args, plan, mixed_precision=FP8),
        lambda: fxshard.simulate(model, args, plan, mixed_precision=FP8),
    ):
        with pytest.raises(OptionError, match="fp8 gathers have not been run on a GPU yet"):
            run()
    with pytest.raises(fxshard.errors.PlanError, match="another graph"):
        fxshard.lower(model, args, plan, mixed_precision=BF16)
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(OptionError, match="fp8 gathers have not been run"):
            fxshard.parallelize(model, args, init_device_mesh("cpu", (2,)), mixed_precision=FP8)
    finally:
        dist.destroy_process_group()
    with pytest.raises(OptionError, match="gathers is 'fp4'"):
        fxshard.MixedPrecision(torch.bfloat16, gathers="fp4")


def test_the_command_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = ["plan", f"{tmp_path / 'model.py'}:training", "--mesh", "dp=64", "--parallel", "dp=fsdp", "--hardware", "h100", "--no-cache"]
    assert cli.main([*command, "--mixed-precision", "bfloat16,float32", "--gathers", "fp8"]) == 0
    assert "gathered in fp8" in capsys.readouterr().out
    assert cli.main([*command, "--gathers", "fp8"]) == 2 and "needs dtypes" in capsys.readouterr().err
    assert cli.main([*command, "--mixed-precision", "bf16"]) == 2 and "cannot read" in capsys.readouterr().err
