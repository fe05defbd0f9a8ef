"""An exported GPT-2 on two gloo ranks, in fresh processes that never import the model's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import gpt2

import fxshard
from fxshard.testing import assert_equal_to_one_device, one_device
from tests.distributed.fresh import ROOT, run_fresh

RANK = """
model = fxshard.load(folder + "/gpt2.pt2").bind(mesh)
out = {"logits": model(**load_file(folder + "/inputs.safetensors"))["logits"].contiguous()}
"""


def exported(folder: Path, tokens: torch.Tensor) -> torch.nn.Module:
    """Writes gpt2.pt2, with a sharded vocabulary, and its inputs; returns the model."""
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
    run_fresh(RANK, tmp_path)
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
