"""What is refused, without compiling anything: programs that compiled code cannot hold, code for another machine, device or program, and
code that a file holds but nobody asked to run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.archive.compiled import CPU_FLAGS, WRITTEN, CompiledCode, CompiledModel, describe
from fxshard.errors import FileError, FxshardError, OptionError, PlanError, RunError
from fxshard.runtime.exported import ExportedProgram
from tests.archive.hostile import edited, entries, pack

CODE = "data/aotinductor/model/model.wrapper"
MACHINE = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": platform.machine()}


def program(**options: Any) -> ExportedProgram:
    return fxshard.export(nn.Linear(4, 4), (torch.zeros(2, 4),), fxshard.Mesh({"tp": 1}, hardware="cpu"), **options)


def with_code(**said: str) -> ExportedProgram:
    """A program with a library that is none."""
    made = program()
    return replace(
        made, compiled=CompiledCode({"model": CompiledModel(b"no library", b"{}", MACHINE | describe(made, ()) | said)}, b"none")
    )


class Rotated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxshard_test.rotated(x)


@torch.library.custom_op("fxshard_test::rotated", mutates_args=())
def rotated(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1)


@rotated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"dynamic_shapes": ({0: "b"},)}, "the program has dynamic sizes"),
        ({"train": True}, "the program has a backward"),
        ({"aot_inductor": "gpu"}, "unknown aot_inductor 'gpu'"),
    ],
)
def test_programs_that_compiled_code_cannot_hold(options: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        program(**{"aot_inductor": "cpu", **options})


def test_an_operator_written_in_python_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"fxshard_test\.rotated.* needs Python"):
        fxshard.export(Rotated(), (torch.zeros(4),), fxshard.Mesh({"tp": 1}, hardware="cpu"), aot_inductor="cpu")


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({CPU_FLAGS: "fma avx1024"}, "for a CPU with avx1024"),
        ({"AOTI_MACHINE": "z80"}, "compiled for z80, this machine is"),
        ({"AOTI_DEVICE_KEY": "cuda"}, "compiled for cuda, the mesh is on cpu"),
        ({}, "the compiled code cannot be loaded"),
    ],
)
def test_code_for_another_machine(mesh: DeviceMesh, said: dict[str, str], what: str) -> None:
    with pytest.raises(RunError, match=what):
        with_code(**said).bind(mesh, compiler="aot_inductor")


def test_code_runs_only_when_asked(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A file whose code cannot even be loaded: everything else works, and another compiler runs its graph."""
    with_code().save(tmp_path / "m.pt2")
    loaded = fxshard.load(tmp_path / "m.pt2")
    assert loaded.compiled == with_code().compiled
    x = torch.randn(2, 4)
    want = loaded.weights["weight"] @ x[0] + loaded.weights["bias"]
    torch.testing.assert_close(loaded.bind(mesh, compiler="eager")(x)[0], want)


def test_what_bind_refuses(mesh: DeviceMesh) -> None:
    with pytest.raises(PlanError, match="holds no compiled code"):
        program().bind(mesh, compiler="aot_inductor")
    with pytest.raises(OptionError, match="debug cannot compare"):
        with_code().bind(mesh, compiler="aot_inductor", debug=True)


def changed(data: dict[str, bytes]) -> dict[str, bytes]:
    return data | {CODE + ".so": b"NO library"}


def without(data: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in data.items() if name != CODE + ".so"}


def beside(data: dict[str, bytes]) -> dict[str, bytes]:
    return data | {"data/aotinductor/model/other.wrapper.so": b""}


def too_many(data: dict[str, bytes]) -> dict[str, bytes]:
    return data | {name.replace("model", "model_1"): content for name, content in data.items() if name.startswith(CODE)}


@pytest.mark.parametrize(
    ("change", "vouch", "what"),
    [
        (changed, False, "its hash is not the manifest's"),
        (without, True, r"has no data/aotinductor/model/model\.wrapper\.so"),
        (beside, True, "which a program does not have"),
        (too_many, True, "which its program does not use"),
    ],
)
def test_files(tmp_path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], vouch: bool, what: str) -> None:
    with_code().save(tmp_path / "m.pt2")
    pack(tmp_path / "m.pt2", change(entries(tmp_path / "m.pt2")), vouch=vouch)
    with pytest.raises(FileError, match=what):
        fxshard.load(tmp_path / "m.pt2")


@pytest.mark.parametrize(
    ("key", "value", "what"), [("fxshard_program", "0", "another program's"), (WRITTEN, "7", "which there are not"), (WRITTEN, 7, "number")]
)
def test_metadata(tmp_path: Path, key: str, value: Any, what: str) -> None:
    with_code().save(tmp_path / "m.pt2")
    with pytest.raises(FxshardError, match=what):
        fxshard.load(edited(tmp_path / "m.pt2", CODE + "_metadata.json", lambda said: {**said, key: value}))
