"""``profile_step``: the prediction is for the sizes of the step, not for those of the example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxshard
from fxshard.errors import OptionError, RunError, SizesError
from fxshard.runtime.exported import ExportedProgram

MESH = fxshard.Mesh({"tp": 1}, hardware="h100")
MANY = 80_000


def linear(rows: int, **options: object) -> ExportedProgram:
    return fxshard.export(nn.Linear(512, 512), (torch.zeros(rows, 512),), MESH, **options)


@pytest.fixture(scope="module")
def dynamic() -> ExportedProgram:
    return linear(8, dynamic_shapes=({0: torch.export.Dim("rows")},))


def test_the_prediction_is_for_the_sizes_of_the_step(dynamic: ExportedProgram) -> None:
    def step(rows: int) -> float:
        return fxshard.profile_step(lambda: torch.zeros(4) + 1, dynamic, 0, sizes={"rows": rows}).predicted.total

    assert step(8) == pytest.approx(fxshard.profile_step(lambda: torch.zeros(4) + 1, linear(8), 0).predicted.total)
    assert step(MANY) == pytest.approx(fxshard.profile_step(lambda: torch.zeros(4) + 1, linear(MANY), 0).predicted.total)
    assert step(MANY) > 5 * step(8)


@pytest.mark.parametrize("sizes", [None, {"batch": 8}, {"rows": 8, "batch": 8}])
def test_sizes_must_be_those_of_the_program(dynamic: ExportedProgram, sizes: dict[str, int] | None) -> None:
    with pytest.raises(OptionError, match="dynamic sizes are rows; given are"):
        fxshard.profile_step(lambda: None, dynamic, 0, sizes=sizes)


def test_sizes_that_the_program_does_not_serve(dynamic: ExportedProgram) -> None:
    with pytest.raises(SizesError):
        fxshard.profile_step(lambda: None, dynamic, 0, sizes={"rows": 0})


def test_a_step_without_the_waits_of_the_program() -> None:
    """As of AOTInductor's code: a table that says 0 us would be wrong."""
    mesh = fxshard.Mesh({"tp": 2})
    program = fxshard.export(nn.Linear(8, 8), (torch.zeros(4, 8),), mesh, input_layouts="S(0)", output_layouts="R")
    assert program.collectives
    with pytest.raises(RunError, match="recorded none of the program's 1 waits"):
        fxshard.profile_step(lambda: torch.zeros(4) + 1, program, 0)
