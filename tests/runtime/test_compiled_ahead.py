"""What is refused, compiling nothing but one mask: programs that compiled code cannot hold, code for another machine, device or program,
and code that a file holds but nobody asked to run."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fxshard
from fxshard.archive.compiled import BOUNDS, CONDITIONS, CPU_FLAGS, GUARDS, WRITTEN, CompiledCode, CompiledModel, bounds_in_words, describe
from fxshard.errors import FileError, FxshardError, OptionError, PlanError, RunError, SizesError
from fxshard.ops.random import draw
from fxshard.runtime.ahead import compile_ahead, load_ahead
from fxshard.runtime.ahead.load_ahead import _capability, _check_gpu
from fxshard.runtime.exported import ExportedProgram
from tests.archive.hostile import edited, entries, pack

CODE = "data/aotinductor/model/model.wrapper"
CALLS = b'{"nodes": []}'
MACHINE = {"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": platform.machine()}


def program(**options: Any) -> ExportedProgram:
    return fxshard.export(nn.Linear(4, 4), (torch.zeros(2, 4),), fxshard.Mesh({"tp": 1}, hardware="cpu"), **options)


def with_code(**said: str) -> ExportedProgram:
    """A program with a library that is none."""
    made = program()
    return replace(
        made, compiled=CompiledCode({"model": CompiledModel(b"no library", CALLS, MACHINE | describe(made, ()) | said)}, b"none")
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


class Window(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 3), None, None, 8, 8, device="cpu")
        return flex_attention(x, x, x, block_mask=mask)


class Computed(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) + y


def test_sizes_that_follow_from_others_are_conditions() -> None:
    """A caller in C++ cannot compute them."""
    mesh, dims = fxshard.Mesh({"tp": 1}, hardware="cpu"), ({0: "a"}, {0: "b"})
    made = fxshard.export(Computed(), (torch.zeros(3, 4), torch.zeros(6, 4)), mesh, dynamic_shapes=dims)
    assert describe(made, ())["fxshard_tensors"].split("\n")[0] == "float32 -2 4"
    found = bounds_in_words(made, ())[CONDITIONS]
    assert "follows from other sizes" in found or "==" in found


@pytest.mark.distributed
def test_a_mask_is_drawn_without_python(mesh: DeviceMesh) -> None:
    """A seed is an input of the code, which computes the keys of the draws from it."""
    made = fxshard.export(nn.Dropout(0.5), (torch.ones(6, 8),), fxshard.Mesh({"tp": 1}, hardware="cpu"), aot_inductor="cpu")
    bound = made.bind(mesh, compiler="aot_inductor")
    for seed in (3, 4):
        torch.manual_seed(seed)
        mask = draw("kept", 0.5, 0, [6, 8], torch.bool, torch.randint(0, 2**62, (), dtype=torch.int64), 0)
        torch.manual_seed(seed)
        assert torch.equal(bound(torch.ones(6, 8)), mask * 2.0)


def test_flex_attention_is_refused_by_the_name_that_a_plan_shows() -> None:
    with pytest.raises(OptionError, match=r"fxshard\.flex_attention\.default, which needs Python"):
        fxshard.export(Window(), (torch.zeros(1, 2, 8, 16),), fxshard.Mesh({"tp": 1}, hardware="cpu"), aot_inductor="cuda")


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


def test_a_program_without_calls_of_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor then writes no file of calls."""
    (tmp_path / "x.wrapper.so").write_bytes(b"library")
    (tmp_path / "x.wrapper_metadata.json").write_text('{"AOTI_DEVICE_KEY": "cpu"}')
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *_, **__: [str(path) for path in tmp_path.glob("x.*")])
    monkeypatch.setattr(compile_ahead, "build_runner", lambda: b"runner")
    program(aot_inductor="cpu").save(tmp_path / "m.pt2")
    found = fxshard.load(tmp_path / "m.pt2").compiled
    assert found is not None and found.models["model"].calls == CALLS and found.models["model"].library == b"library"


@pytest.mark.parametrize(("compiled", "found", "runs"), [(90, (9, 0), True), (80, (8, 6), True), (89, (8, 6), False), (80, (9, 0), False)])
def test_code_for_another_gpu(monkeypatch: pytest.MonkeyPatch, compiled: int, found: tuple[int, int], runs: bool) -> None:
    """Machine code runs on its major version, from its minor version on (CUDA C++ Programming Guide, binary compatibility)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    with nullcontext() if runs else pytest.raises(RunError, match=rf"capability {compiled / 10}, this one has {found[0]}\.{found[1]}"):
        _check_gpu(compiled, torch.device("cuda", 0))


@pytest.mark.parametrize("said", ["9.0", "gfx90a", "", "٩٠", "9" * 5000])
def test_a_capability_that_is_no_number(said: str) -> None:
    with pytest.raises(FileError, match="no number"):
        _capability(said)
    assert _capability("90") == 90


GUARD = {"condition": "LessThan(Symbol('s', positive=True, integer=True), Integer(40))", "sizes": [["b", "s", 1]], "where": "kernel.py:7"}


def test_sizes_that_the_code_does_not_serve(mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard of the compiler in the metadata: other sizes run, as the code would, and these are refused by name, not compiled again."""
    made = program(dynamic_shapes=({0: "b"},))
    assert bounds_in_words(made, ()) == {BOUNDS: f"1 {2**40} b", CONDITIONS: ""}
    said = MACHINE | describe(made, ()) | {GUARDS: json.dumps({"guards": [GUARD]}), BOUNDS: "1 40 b", CONDITIONS: ""}
    coded = replace(made, compiled=CompiledCode({"model": CompiledModel(b"no library", CALLS, said)}, b"none"))
    coded.save(tmp_path / "m.pt2")
    shapes: list[list[tuple[int, ...]]] = []

    def load_model(*_: Any) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            shapes.append([tuple(one.shape) for one in inputs])
            return [inputs[2] @ inputs[0].t() + inputs[1]]

        return run

    monkeypatch.setattr(load_ahead, "load_model", load_model)
    bound = fxshard.load(tmp_path / "m.pt2").bind(mesh, compiler="aot_inductor")
    for rows in (2, 40):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(bound(x), x @ made.weights["weight"].t() + made.weights["bias"])
        assert shapes[-1] == [(4, 4), (4,), (rows, 4), (rows, 0)]
    with pytest.raises(SizesError, match=r"the compiled code takes for granted that b <= 40 \(kernel\.py:7\)"):
        bound(torch.randn(41, 4))
    for key, lax in ((BOUNDS, f"1 {2**40} b"), (CONDITIONS, "b > 3")):
        with pytest.raises(FileError, match="bounds and conditions are not those of its guards"):
            fxshard.load(edited(tmp_path / "m.pt2", CODE + "_metadata.json", lambda said, key=key, lax=lax: {**said, key: lax}))
    for change, what in (
        ({"sizes": [["c", "s", 1]]}, "a guard is a condition on sizes"),
        ({"condition": "1"}, "cannot read the expression"),
    ):
        bad = json.dumps({"guards": [GUARD | change]})
        with pytest.raises(FileError, match=what):
            fxshard.load(edited(tmp_path / "m.pt2", CODE + "_metadata.json", lambda said, bad=bad: {**said, GUARDS: bad}))


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
        (lambda data: data | {CODE + ".json": b'"' + b"x" * 10**7 + b'"'}, True, "expected an object, found a text"),
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
    ("key", "value", "what"),
    [
        ("fxshard_mesh", "tp=2", "another program's"),
        (WRITTEN, "7", "which there are not"),
        (WRITTEN, 7, "number"),
        ("fxshard_program", 7, "number"),
    ],
)
def test_metadata(tmp_path: Path, key: str, value: Any, what: str) -> None:
    with_code().save(tmp_path / "m.pt2")
    with pytest.raises(FxshardError, match=what):
        fxshard.load(edited(tmp_path / "m.pt2", CODE + "_metadata.json", lambda said: {**said, key: value}))


def test_graphs_are_read_when_something_needs_them(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Compiled code does not. What does checks graphs that were changed together with their hashes, as a file without code is when it is
    loaded."""
    x = torch.randn(2, 4)
    with_code().save(tmp_path / "m.pt2")
    loaded = fxshard.load(tmp_path / "m.pt2")
    with pytest.raises(RunError, match="the compiled code cannot be loaded"):
        loaded.bind(mesh, compiler="aot_inductor")
    assert (loaded.hash, loaded.plan.hash) == (program().hash, program().plan.hash) and "found" not in vars(loaded.modules)
    want = x.double() @ loaded.weights["weight"].double().t() + loaded.weights["bias"]
    torch.testing.assert_close(fxshard.simulate(loaded, (x,)).outputs.double(), want, rtol=1e-5, atol=1e-5)

    changes: list[tuple[str, Callable[[Any], Any], str]] = [
        ("models/model.json", lambda said: said["graph_module"]["graph"]["nodes"].clear(), "is read before it is computed"),
        (CODE + "_metadata.json", lambda said: {**said, "fxshard_program": "0"}, "another program's: its fxshard_program differs"),
    ]
    for entry, change, what in changes:
        with_code().save(tmp_path / "m.pt2")
        refused = fxshard.load(edited(tmp_path / "m.pt2", entry, change))
        for _ in range(2):
            with pytest.raises(FileError, match=what):
                fxshard.simulate(refused, (x,))
