"""Programs of real models, saved and loaded: the graphs are the same and the numbers right."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import fxshard
from fxshard import archive

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MESH = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
LAYOUTS = {"input_layouts": {"args[0]": "S(0)R"}, "pins": {"layers.*.attention.w[qkv].weight": "RS(0)", "output.weight": "RS(0)"}}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_small_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    """Five sequences on two ranks have two size classes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    model = importlib.import_module("llama").Llama.small(layers=1).double()
    tokens = torch.randint(0, 256, (5, 8))
    args = (tokens, tokens) if train else (tokens,)
    plan = fxshard.plan(model, args, MESH, train=train, **LAYOUTS)
    program = fxshard.lower(model, args, plan)
    archive.save(program, tmp_path / "m.pt2", model.state_dict())
    loaded, weights = archive.load(tmp_path / "m.pt2"), archive.load_weights(tmp_path / "m.pt2")

    assert len(loaded.modules) == 2
    assert loaded.plan.hash == program.plan.hash
    for size_class, module in program.modules.items():
        again = loaded.modules[size_class]
        assert [n.format_node() for n in module.graph.nodes] == [n.format_node() for n in again.graph.nodes]
    assert loaded.hash == program.hash
    result = fxshard.simulate(loaded, args, weights=weights)
    expected = model(*args)
    torch.testing.assert_close(result.outputs, expected, rtol=1e-9, atol=1e-9)
    if train:
        expected.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result.grads[name], parameter.grad, rtol=1e-9, atol=1e-9)
