"""An exported GPT-2 on two gloo ranks, in fresh processes that never see the model's code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import gpt2

import fxshard
from fxshard.testing import assert_equal_to_one_device, one_device

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from safetensors.torch import load_file, save_file
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
import fxshard
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = fxshard.load(folder + "/gpt2.pt2").bind(mesh)
out = model(**load_file(folder + "/inputs.safetensors"))
assert fxshard.__file__ == sys.argv[3], "another fxshard than the one under test"
assert not any(name.split(".")[0] in ("transformers", "zoo", "tests", "examples") for name in sys.modules), "the model's code was imported"
save_file({"logits": out["logits"].contiguous()}, f"{folder}/out{rank}.safetensors")
dist.barrier()
"""


def exported(folder: Path, tokens: torch.Tensor) -> torch.nn.Module:
    """Writes gpt2.pt2, its vocabulary sharded, and its inputs; returns the model."""
    torch.manual_seed(0)
    model = gpt2()[0].model
    model.eval()
    mesh = fxshard.Mesh({"tp": 2}, hardware="cpu")
    pins = {"transformer.wte.weight": "S(0)", "transformer.h.*.mlp.c_fc.weight": "S(1)"}
    program = fxshard.export(model, (), mesh, example_kwargs={"input_ids": tokens}, pins=pins)
    assert program.collectives
    program.save(folder / "gpt2.pt2")
    save_file({"input_ids": tokens}, folder / "inputs.safetensors")
    return model


@pytest.mark.distributed
def test_fresh_processes_give_the_same_outputs(tmp_path: Path) -> None:
    tokens = torch.randint(0, 50257, (2, 8))
    model = exported(tmp_path, tokens)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(r), str(ROOT / "fxshard" / "__init__.py")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        for r in ranks:
            assert r.wait(timeout=300) == 0, r.stderr and r.stderr.read()[-3000:]
    finally:
        for r in ranks:
            r.kill()
    with torch.no_grad():
        want = model(input_ids=tokens).logits
    for rank in range(2):
        torch.testing.assert_close(load_file(tmp_path / f"out{rank}.safetensors")["logits"], want, rtol=1e-5, atol=1e-5)


def test_a_loaded_program_simulates_and_is_inspected_without_a_process_group(tmp_path: Path) -> None:
    tokens = torch.randint(0, 50257, (2, 8))
    model = exported(tmp_path, tokens)
    program = fxshard.load(tmp_path / "gpt2.pt2")
    result = fxshard.simulate(program, (), kwargs={"input_ids": tokens})
    assert_equal_to_one_device(result, one_device(model, (), {"input_ids": tokens}, train=False), rtol=1e-5)
    shown = subprocess.run(
        [sys.executable, "-m", "fxshard", "inspect", str(tmp_path / "gpt2.pt2")], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "tp=2" in shown.stdout and "transformer.wte.weight" in shown.stdout
