"""A bound program at many sizes: one compilation serves all, except sizes that break a guard of the compiler; a log line names those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fxshard
from fxshard.errors import RunError, SizesError
from fxshard.runtime import exported
from fxshard.shapes import Guard

DIMS = ({0: torch.export.Dim("batch", max=40)}, {0: torch.export.Dim("batch", max=40)})


class Sum(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x + y)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the programs that are compiled."""
    found: list[Any] = []
    real = exported.compile_program
    monkeypatch.setattr(exported, "compile_program", lambda bound, **options: found.append(bound.program) or real(bound, **options))
    return found


def bound_and_model(mesh: DeviceMesh, path: Path) -> tuple[Any, nn.Module]:
    model = Sum(4, 3)
    args = (torch.ones(6, 4), torch.ones(6, 4))
    fxshard.export(model, args, mesh, dynamic_shapes=DIMS).save(path)
    return fxshard.load(path).bind(mesh, compiler="eager"), model


def equal(bound: Any, model: nn.Module, rows: int) -> None:
    x, y = torch.randn(rows, 4), torch.randn(rows, 4)
    torch.testing.assert_close(bound(x, y), model(x, y))


def test_one_compilation_serves_every_size(mesh: DeviceMesh, tmp_path: Path, compiled: list[Any]) -> None:
    bound, model = bound_and_model(mesh, tmp_path / "m.pt2")
    for rows in (6, 1, 7, 40, 7):
        equal(bound, model, rows)
    assert len(compiled) == 1
    with pytest.raises(SizesError, match="batch is 41, it must be from 1 to 40"):
        equal(bound, model, 41)
    with pytest.raises(RunError, match=r"dim 0 of args\[1\] is 5, batch is 4"):
        bound(torch.ones(4, 4), torch.ones(5, 4))
    with pytest.raises(RunError, match=r"args\[0\] is \(4, 5\) torch.float32, the program takes \(4, 4\)"):
        bound(torch.ones(4, 5), torch.ones(4, 4))


def test_a_size_that_breaks_a_guard_of_the_compiler_gets_its_own_program(
    mesh: DeviceMesh, tmp_path: Path, compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    bound, model = bound_and_model(mesh, tmp_path / "m.pt2")
    size = sympy.Symbol("s", integer=True)
    guard = Guard(sympy.Ne(size, 5), (("batch", size, 1),), "kernel.py:7")
    artefact = replace(bound._compiled.artefact, guards=(guard,))
    bound._compiled = replace(bound._compiled, make=lambda: artefact)
    for rows in (6, 5, 7, 5, 6):
        equal(bound, model, rows)
    assert [len(program.sizes) for program in compiled] == [1, 0], "the program for batch=5 has no dynamic sizes"
    assert "for batch=5 alone: the compiler takes for granted that batch != 5 (kernel.py:7)" in caplog.text
