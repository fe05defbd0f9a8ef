"""Programs compiled ahead of time on two gloo ranks, in Python without Inductor and in C++ without Python: with ranks of two size classes
and any number of rows, and as a training step with AdamW, beside the same program run eagerly, and one device."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from tests.distributed.fresh import ROOT, run_fresh

STEPS = {"serving": 30, "short": 2, "step": 3, "apart": 3}
"""By the program's name, how often it is called. "short" is "serving", called with one row of length one, so that a rank has none."""
RANK = f"""
for name, steps in {STEPS}.items():
    program, inputs = fxshard.load(f"{{folder}}/{{name}}.pt2"), load_file(f"{{folder}}/{{name}}.in.safetensors")
    # run_program aligns what it reads: sums of products may differ in their last bit where memory is not aligned, as in a mapped file
    inputs, weights = ({{key: value.clone() for key, value in one.items()}} for one in (inputs, program.weights))
    model = program.bind(mesh, weights, compiler="aot_inductor")
    assert not {{"torch._inductor.compile_fx", "torch._inductor.ir"}} & set(sys.modules), "Inductor was imported"
    results = [model(*inputs.values()).detach().clone() for _ in range(steps)]
    assert program.collectives[0].node in model._compiled.watchdog.activity["forward"].names()[0]
    assert program.sizes or "found" not in vars(program.modules), "graphs were read"
    out[name + ".outputs[0]"] = results[-1]
    out.update({{f"{{name}}.{{key}}": p.detach().to_local().contiguous() for key, p in model.named_parameters()}})
    eager = program.bind(mesh, compiler="eager")
    torch.testing.assert_close([eager(*inputs.values()) for _ in range(steps)], results, rtol=1e-9, atol=1e-9)
    for key, p in eager.named_parameters():
        torch.testing.assert_close(out[f"{{name}}.{{key}}"], p.to_local(), rtol=1e-9, atol=1e-9)
"""


class Serving(nn.Module):
    """[rows, length, 6] to [rows, length, 12], by views that torch computes differently for a size of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.down(self.up(x).tanh()).unflatten(-1, (2, 2)).transpose(1, 2)
        heads = heads * heads.softmax(2)
        return heads.repeat_interleave(3, dim=1).transpose(1, 2).flatten(2)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x)).tanh()) - y).square().mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """serving.pt2, whose ranks hold 5 and 4 of 9 rows of a weight, and the same as short.pt2; step.pt2; apart.pt2, the same with weights in
    the ranks' files. Their inputs (NAME.in.safetensors), the results of one device, and those of Python's ranks (out0.safetensors,
    out1.safetensors)."""
    path, mesh = tmp_path_factory.mktemp("ahead"), fxshard.Mesh({"tp": 2}, hardware="cpu")
    torch.manual_seed(0)
    serving, model = Serving().double(), Regression().double()
    x, y = torch.randn(4, 6).double(), torch.randn(4, 3).double()
    given: Any = {"serving": {"args[0]": torch.randn(7, 5, 6).double()}, "short": {"args[0]": torch.randn(1, 1, 6).double()}}
    options: Any = {
        "pins": {"up.weight": "S(0)"},
        "input_layouts": "S(0)",
        "dynamic_shapes": ({0: torch.export.Dim("rows", max=40), 1: torch.export.Dim("length", max=20)},),
        "aot_inductor": "cpu",
    }
    program = fxshard.export(serving, (torch.randn(4, 3, 6).double(),), mesh, **options)
    assert program.collectives and program.compiled is not None and len(program.modules) == len(program.compiled.models) == 2
    for name in given:
        program.save(path / f"{name}.pt2")
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = fxshard.export(model, (x, y), mesh, pins={"up.weight": "S(0)"}, train=True, optimizer=adamw, aot_inductor="cpu")
    assert step.collectives
    step.save(path / "step.pt2")
    step.save(path / "apart.pt2", weights="per-rank")
    for name in STEPS:
        save_file(given.get(name, {"args[0]": x, "args[1]": y}), path / f"{name}.in.safetensors")
    want = {name: serving(inputs["args[0]"]).detach() for name, inputs in given.items()}
    for _ in range(STEPS["step"]):
        adamw.zero_grad()
        loss = model(x, y)
        loss.backward()
        adamw.step()
    want |= {"step": loss.detach(), "down.bias": model.down.bias.detach()}
    save_file(want, path / "want.safetensors")
    run_fresh("out = {}" + RANK, path, inductor=False)
    return path


@pytest.mark.distributed
def test_python_without_inductor(folder: Path) -> None:
    want = load_file(folder / "want.safetensors")
    for rank in range(2):
        found = load_file(folder / f"out{rank}.safetensors")
        pairs = {
            **{f"{n}.outputs[0]": n for n in ("serving", "short")},
            **{f"{n}.outputs[0]": "step" for n in ("step", "apart")},
            "step.down.bias": "down.bias",
        }
        for name, of in pairs.items():
            torch.testing.assert_close(found[name], want[of], rtol=1e-9, atol=1e-9)
        assert found["serving.up.weight"].shape == (5 - rank, 6)


@pytest.fixture(scope="module")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp, built."""
    for tool, remedy in (("cmake", "apt-get install cmake"), (os.environ.get("CXX", "g++").split()[0], "apt-get install g++")):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} to build examples/cpp: {remedy}")
    build = tmp_path_factory.mktemp("build")
    configure = ["cmake", "-S", str(ROOT / "examples/cpp"), "-B", str(build), f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    for command in (configure, ["cmake", "--build", str(build)]):
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    return build / "run_program"


@pytest.mark.distributed
@pytest.mark.parametrize("name", STEPS)
def test_cpp_without_python(folder: Path, run_program: Path, tmp_path: Path, name: str) -> None:
    """To the bit what Python's ranks returned: outputs and, of a step, what they hold of the new weights and of the optimiser's state."""
    ranks = []
    for rank in range(2):
        files = [folder / f"{name}.pt2", str(rank), tmp_path / "store", folder / f"{name}.in.safetensors", tmp_path / f"{rank}.safetensors"]
        more = ["--weights", folder / f"apart.pt2.rank-0000{rank}.safetensors"] if name == "apart" else []
        command = [run_program, *files, *more, "--steps", str(STEPS[name])]
        ranks.append(subprocess.Popen(command, env={"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True))
    for one in ranks:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said[-3000:]
    for rank in range(2):
        found, want = load_file(tmp_path / f"{rank}.safetensors"), load_file(folder / f"out{rank}.safetensors")
        assert len(found) == (1 if name in ("serving", "short") else 25)
        for key, value in found.items():
            torch.testing.assert_close(value, want[f"{name}.{key}"], rtol=0, atol=0)


@pytest.mark.distributed
def test_cpp_refuses_sizes_that_the_code_does_not_serve(folder: Path, run_program: Path, tmp_path: Path) -> None:
    save_file({"args[0]": torch.zeros(41, 5, 6).double()}, tmp_path / "in.safetensors")
    command = [run_program, folder / "serving.pt2", "{}", tmp_path / "store", tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
    ranks = [subprocess.Popen([str(part).format(rank) for part in command], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    for one in ranks:
        _, said = one.communicate(timeout=120)
        assert one.returncode != 0 and "rows is 41, the code serves 1 to 40" in said


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("x", "what"),
    [
        (torch.ones(8, 6).double(), "args[0] is Double[8, 6], this rank takes float64[4, 6]"),
        (torch.ones(4, 6), "args[0] is Float[4, 6], this rank takes float64[4, 6]"),
        (torch.ones(4, 6, 1).double(), "args[0] is Double[4, 6, 1], this rank takes float64[4, 6]"),
        (None, "there is no tensor args[0]"),
    ],
    ids=["rows", "dtype", "dims", "missing"],
)
def test_cpp_refuses_other_tensors(folder: Path, run_program: Path, tmp_path: Path, x: torch.Tensor | None, what: str) -> None:
    """The program "step" has static sizes; its code would read beyond the end of the wrong ones."""
    save_file({"args[1]": torch.ones(4, 3).double(), **({} if x is None else {"args[0]": x})}, tmp_path / "in.safetensors")
    files = [tmp_path / "store", tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
    ran = subprocess.run([run_program, folder / "step.pt2", "0", *files], env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (2, f"{what}\n")


@pytest.mark.distributed
def test_cpp_refuses_another_shard(folder: Path, run_program: Path, tmp_path: Path) -> None:
    """A rank's file that holds a whole weight in place of the rank's half."""
    held = load_file(folder / "apart.pt2.rank-00000.safetensors")
    assert held["up.weight"].shape == (4, 6)
    save_file({**held, "up.weight": torch.ones(8, 6).double()}, tmp_path / "held.safetensors")
    files = [tmp_path / "store", folder / "apart.in.safetensors", tmp_path / "out.safetensors", "--weights", tmp_path / "held.safetensors"]
    ran = subprocess.run([run_program, folder / "apart.pt2", "0", *files], env={"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (2, "up.weight is Double[8, 6], this rank takes float64[4, 6]\n")


@pytest.mark.slow
@pytest.mark.distributed
def test_cpp_on_two_axes(run_program: Path, tmp_path: Path) -> None:
    """Each of four processes has a group for either axis: what they return is one device's result."""
    torch.manual_seed(0)
    model, x, y = Regression().double(), torch.randn(4, 6).double(), torch.randn(4, 3).double()
    mesh = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="cpu")
    layouts: Any = {"pins": {"up.weight": "RS(0)", "down.weight": "RS(1)"}, "input_layouts": {"args[*]": "S(0)R"}, "aot_inductor": "cpu"}
    program = fxshard.export(model, (x, y), mesh, **layouts)
    assert {c.axis for c in program.collectives} == {"dp", "tp"}
    program.save(tmp_path / "two.pt2")
    save_file({"args[0]": x, "args[1]": y}, tmp_path / "in.safetensors")
    ranks = []
    for rank in range(4):
        command = [
            run_program,
            tmp_path / "two.pt2",
            str(rank),
            tmp_path / "store",
            tmp_path / "in.safetensors",
            tmp_path / f"{rank}.safetensors",
        ]
        ranks.append(subprocess.Popen(command, env={"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True))
    for rank, one in enumerate(ranks):
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said[-3000:]
        torch.testing.assert_close(load_file(tmp_path / f"{rank}.safetensors")["outputs[0]"], model(x, y).detach(), rtol=1e-12, atol=1e-12)
