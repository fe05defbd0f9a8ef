"""An exported GPT-2 on two gloo ranks, in fresh processes that never import the model's code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import gpt2

import fxshard
from fxshard.cli import main as cli
from fxshard.testing import assert_equal_to_one_device, one_device
from tests.distributed.fresh import run_fresh

RANK = """
model = fxshard.load(folder + "/gpt2.pt2").bind(mesh)
out = {"logits": model(**load_file(folder + "/inputs.safetensors"))["logits"].contiguous()}
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, torch.Tensor]:
    """A folder with gpt2.pt2, with a sharded vocabulary, and its inputs; the model; the tokens."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = gpt2(vocabulary=1001)[0].model
    model.eval()
    tokens = torch.randint(0, 1001, (2, 8))
    mesh = fxshard.Mesh({"tp": 2}, hardware="cpu")
    pins = {"transformer.wte.weight": "S(0)", "transformer.h.*.mlp.c_fc.weight": "S(1)"}
    program = fxshard.export(model, (), mesh, example_kwargs={"input_ids": tokens}, pins=pins)
    assert program.collectives
    program.save(folder / "gpt2.pt2")
    save_file({"input_ids": tokens}, folder / "inputs.safetensors")
    return folder, model, tokens


@pytest.mark.distributed
def test_fresh_processes_give_the_same_outputs(exported: tuple[Path, torch.nn.Module, torch.Tensor]) -> None:
    folder, model, tokens = exported
    run_fresh(RANK, folder)
    with torch.no_grad():
        want = model(input_ids=tokens).logits
    for rank in range(2):
        torch.testing.assert_close(load_file(folder / f"out{rank}.safetensors")["logits"], want, rtol=1e-5, atol=1e-5)


def test_a_loaded_program_simulates_and_is_inspected_without_a_process_group(
    exported: tuple[Path, torch.nn.Module, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model, tokens = exported
    program = fxshard.load(folder / "gpt2.pt2")
    result = fxshard.simulate(program, (), kwargs={"input_ids": tokens})
    assert_equal_to_one_device(result, one_device(model, (), {"input_ids": tokens}, train=False), rtol=1e-5)
    assert cli.main(["inspect", str(folder / "gpt2.pt2")]) == 0
    shown = capsys.readouterr().out
    assert "tp=2" in shown and "transformer.wte" in shown
