"""Tables of timelines and passes, as golden texts; for a plan alone the command asks for a program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fxshard
from fxshard import inspect
from fxshard.cli.main import main
from fxshard.timeline import DEVICE, Event, Timeline
from tests.plans.small_plans import small_plan

TIMELINE = Timeline(
    (
        Event("up", "aten.mm.default", DEVICE, 0.0, 40.0),
        Event("mask", "aten.neg.default", DEVICE, 40.0, 40.5),
        Event("sum_up", "all_reduce", "tp", 40.0, 70.0, waited=9.5),
        Event("down", "aten.mm.default", DEVICE, 40.5, 60.5),
    ),
    70.0,
)


def test_a_timeline() -> None:
    assert_expected_inline(
        inspect.timeline_table(TIMELINE, least=1.0),
        """\
70.0 us: 60.5 of operators, 9.5 waited for 30.0 of collectives; 1 short operator not shown
start    end    stream    operator         node    waited
-------  -----  --------  ---------------  ------  --------
0.0      40.0   device    aten.mm.default  up
40.0     70.0   tp        all_reduce       sum_up  9.5
40.5     60.5   device    aten.mm.default  down""",
    )


def exported(folder: Path) -> str:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    pins = {"0.weight": "S(0)", "1.weight": "S(1)", "1": "P"}
    path = str(folder / "program.pt2")
    fxshard.export(model, (torch.randn(4, 8),), fxshard.Mesh({"tp": 2}), pins=pins, output_layouts="R").save(path)
    return path


def test_the_command_prints_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", exported(tmp_path), "--timeline"]) == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert [line[2:4] for line in lines[3:]] == [["device", "fxshard.einsum.default"]] * 2 + [["tp", "all_reduce"]], said


def test_a_plans_timeline_is_as_long_as_its_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    small_plan().save(path)
    assert main(["inspect", path, "--timeline"]) == 0
    assert capsys.readouterr().out.startswith("10.8 us: 3.2 of operators, 7.5 waited for 7.5 of collectives")


def test_a_loaded_program_has_no_table_of_passes(tmp_path: Path) -> None:
    assert inspect.passes_table(fxshard.load(exported(tmp_path))).startswith("no passes after lowering")
