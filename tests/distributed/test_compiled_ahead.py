"""Programs compiled ahead of time on two gloo ranks, in Python without Inductor and in C++ without Python: with ranks of two size classes,
and as a training step with AdamW, beside the same program run eagerly, and one device."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fxshard
from tests.distributed.fresh import ROOT, run_fresh

STEPS = {"serving": 30, "step": 3, "apart": 3}
RANK = f"""
for name, steps in {STEPS}.items():
    program, inputs = fxshard.load(f"{{folder}}/{{name}}.pt2"), load_file(f"{{folder}}/{{name}}.in.safetensors")
    model = program.bind(mesh, compiler="aot_inductor")
    assert not {{"torch._inductor.compile_fx", "torch._inductor.ir"}} & set(sys.modules), "Inductor was imported"
    results = [model(*inputs.values()).detach().clone() for _ in range(steps)]
    out[name + ".outputs[0]"] = results[-1]
    out.update({{f"{{name}}.{{key}}": p.detach().to_local().contiguous() for key, p in model.named_parameters()}})
    eager = program.bind(mesh, compiler="eager")
    torch.testing.assert_close([eager(*inputs.values()) for _ in range(steps)], results, rtol=1e-9, atol=1e-9)
    for key, p in eager.named_parameters():
        torch.testing.assert_close(out[f"{{name}}.{{key}}"], p.to_local(), rtol=1e-9, atol=1e-9)
"""


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.norm(self.up(x)).tanh()) - y).square().mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """serving.pt2, whose ranks hold 5 and 4 of 9 rows; step.pt2; apart.pt2, the same with weights in the ranks' files. Their inputs
    (NAME.in.safetensors), the results of one device, and those of Python's ranks (out0.safetensors, out1.safetensors)."""
    path, mesh = tmp_path_factory.mktemp("ahead"), fxshard.Mesh({"tp": 2}, hardware="cpu")
    torch.manual_seed(0)
    serving, model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double(), Regression().double()
    x, y = torch.randn(4, 6).double(), torch.randn(4, 3).double()
    program = fxshard.export(serving, (x,), mesh, pins={"0.weight": "S(0)"}, aot_inductor="cpu")
    assert program.collectives and program.compiled is not None and len(program.modules) == len(program.compiled.models) == 2
    program.save(path / "serving.pt2")
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = fxshard.export(model, (x, y), mesh, pins={"up.weight": "S(0)"}, train=True, optimizer=adamw, aot_inductor="cpu")
    assert step.collectives
    step.save(path / "step.pt2")
    step.save(path / "apart.pt2", weights="per-rank")
    for name in STEPS:
        save_file({"args[0]": x} if name == "serving" else {"args[0]": x, "args[1]": y}, path / f"{name}.in.safetensors")
    want = {"serving": serving(x).detach()}
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
        pairs = {"serving.outputs[0]": "serving", **{f"{n}.outputs[0]": "step" for n in ("step", "apart")}, "step.down.bias": "down.bias"}
        for name, of in pairs.items():
            torch.testing.assert_close(found[name], want[of], rtol=1e-9, atol=1e-9)
        assert found["serving.0.weight"].shape == (5 - rank, 6)


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
        assert len(found) == (1 if name == "serving" else 25)
        for key, value in found.items():
            torch.testing.assert_close(value, want[f"{name}.{key}"], rtol=0, atol=0)
