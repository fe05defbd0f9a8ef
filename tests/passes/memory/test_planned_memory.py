"""The memory of a plan over time: it adds up to ``plan.memory``, has the user's names, and agrees with a count by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard import inspect
from fxshard.cli.main import main
from fxshard.errors import ConstraintError, PlanError
from fxshard.memory_profile import KINDS, MemoryProfile
from fxshard.passes.memory.planned_memory import Shortage

ROWS, DIM, FLOAT = 64, 16, 4


class Stack(nn.Module):
    """Two equal blocks. Each saves the input of its sine for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.sum()


def planned(**options: Any) -> tuple[fxshard.ShardingPlan, MemoryProfile]:
    mesh = fxshard.Mesh({"dp": 2}, hardware="h100")
    pins = {"layers.*.weight": "R", "layers.0": "S(0)", "layers.1": "S(0)"}
    options = {"input_layouts": {"args[0]": "S(0)"}, "pins": pins, "optimizer": "adamw"} | options
    plan = fxshard.plan(Stack(), (torch.ones(ROWS, DIM),), mesh, cache=False, **options)
    return plan, plan.memory_profile()


def test_the_profile_agrees_with_the_plan() -> None:
    plan, profile = planned()
    assert profile.by_kind() == plan.memory and profile.peak == sum(plan.memory.values()) and set(plan.memory) <= set(KINDS)
    weights, rows = 2 * DIM * DIM * FLOAT, ROWS // 2 * DIM * FLOAT
    assert plan.memory["parameter"] == weights and plan.memory["optimizer"] == 2 * weights
    named = {(t.name, t.kind, t.bytes) for t in profile.tensors}
    assert {("args[0]", "input", rows), *(("layers.0.weight", kind, weights // 2) for kind in ("parameter", "gradient"))} <= named
    kept = [t for t in profile.tensors if t.kind == "activation" and t.name.startswith("layers")]
    assert [t.name for t in kept] == ["layers.0 (einsum)", "layers.1 (einsum)"] and all(t.bytes == rows for t in kept)
    assert all("test_planned_memory.py" in t.source for t in kept) and {t.layout for t in kept} == {"S(0)"}


def test_the_profile_agrees_with_the_program() -> None:
    plan, profile = planned()
    lowered = fxshard.lower(
        Stack(), (torch.ones(ROWS, DIM),), plan, without=["schedule", "chunk", "bucket"]
    )  # without a limit these passes may use more memory
    program = fxshard.program_memory(lowered, torch.optim.AdamW)
    for kind in ("parameter", "optimizer", "input"):
        assert program.by_kind()[kind] - profile.by_kind()[kind] in range(33), "only a program counts the rank's axis indexes"
    assert abs(program.peak - profile.peak) <= 0.1 * program.peak


def test_a_loaded_plan_has_no_profile(tmp_path: Path) -> None:
    plan, _ = planned()
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="does not know the graph"):
        fxshard.ShardingPlan.load(tmp_path / "plan.json").memory_profile()


def test_the_profile_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text("import torch\ndef training():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n")
    assert main(["plan", f"{model}:training", "--mesh", "dp=2", "--memory", "--optimizer", "AdamW", "--no-cache"]) == 0
    printed = capsys.readouterr().out
    assert "at the peak" in printed and "over time" in printed and "optimizer" in printed


def test_a_limit_below_every_plan() -> None:
    """The error names a limit that is enough, a bound below which there is no plan, and the largest tensors with their lines."""
    with pytest.raises(ConstraintError, match=r"nothing fits in memory_limit=1\.00 KB \(1,000 bytes\) per device") as caught:
        planned(memory_limit="1KB")
    where, remedy = str(caught.value.where), str(caught.value.remedy)
    assert "layers.0.weight" in where and "einsum_" not in where and "test_planned_memory.py:" in where
    assert "raise the limit: the least found is" in remedy and "no plan takes less than" in remedy


def test_a_layout_that_exceeds_the_limit() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.ones(2, 64)
    mesh = fxshard.Mesh({"dp": 2}, hardware="h100")
    plan = fxshard.plan(model, (x,), mesh, cache=False, optimizer="adam", memory_limit="50KB")
    whole = plan.explain("weight", "R").choices[0]
    assert whole.total is None and whole.reason.startswith("no plan has it within memory_limit: the least found takes ")


def test_the_error_if_no_plan_is_found_in_time() -> None:
    said = str(Shortage(4 * 10**9, 4225402888.0, 3956093857.004, fxshard.Mesh({"dp": 8}), None).not_found(2.5))
    assert said.startswith("no plan that fits in memory_limit=4.00 GB (4,000,000,000 bytes) was found, nor a proof")
    assert "that there is none, within time_limit=2.5 s" in said
    assert "give more time, or raise the limit: the least found is 4.23 GB (4,225,402,888 bytes)" in said
    assert "no plan takes less than 3.96 GB (3,956,093,857 bytes)" in said
    stateless = str(Shortage(8, 9.0, 8.5, fxshard.Mesh({"dp": 8}), None, has_state=False, offload=()).impossible())
    assert "an optimizer with less state" in said
    assert stateless.endswith("Otherwise use a larger mesh, a smaller batch, or fewer pins and input_layouts")


def test_the_table_is_no_wider_than_a_terminal() -> None:
    _, profile = planned()
    assert max(map(len, inspect.memory_table(profile).splitlines())) <= 110
