"""Models exported once for all sizes of their dynamic dims, loaded from a file: simulated in float64, each size equals one device."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import gpt2

import fxshard
from fxshard.cli.inspect_file import stored
from fxshard.errors import SizesError
from fxshard.program.fields import program_fields
from fxshard.testing import assert_equal_to_one_device, one_device

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIMS = {0: "batch", 1: "seq"}


def through_a_file(path: Path, program: Any) -> Any:
    program.save(path)
    loaded = fxshard.load(path)
    assert loaded.hash == program.hash
    assert stored(str(path)).program == json.loads(json.dumps(program_fields(loaded))), "inspect says what the live program says"
    return loaded


def equal(program: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    want = one_device(model, args, kwargs, train=False)
    assert_equal_to_one_device(fxshard.simulate(program, args, kwargs=kwargs), want)


@pytest.mark.parametrize("even", [False, True], ids=["any", "even"])
def test_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, even: bool) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    model = importlib.import_module("llama").Llama.small(layers=1).double()
    mesh = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
    layouts = {"input_layouts": {"args[0]": "S(0)R"}, "pins": {"layers.*.attention.w[qkv].weight": "RS(0)", "output.weight": "RS(0)"}}
    tokens = torch.randint(0, 256, (4, 8))
    program = fxshard.export(model, (tokens,), mesh, dynamic_shapes=(DIMS,), even=even, **layouts)
    loaded = through_a_file(tmp_path / "m.pt2", program)
    assert len(loaded.modules) == 1
    for batch, seq in ((2, 6), (6, 1), *(() if even else ((3, 5), (7, 9)))):
        equal(loaded, model, (torch.randint(0, 256, (batch, seq)),), {})
    if even:
        with pytest.raises(SizesError, match=r"batch is 3, shards are even at multiples of 2"):
            equal(loaded, model, (torch.randint(0, 256, (3, 5)),), {})


def test_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = gpt2()[0].model.eval().double()
    tokens = torch.randint(0, 50257, (2, 8))
    pins = {"transformer.wte.weight": "S(0)", "transformer.h.*.mlp.c_fc.weight": "S(1)"}
    mesh, named = fxshard.Mesh({"tp": 2}, hardware="cpu"), {"input_ids": tokens}
    program = fxshard.export(model, (), mesh, example_kwargs=named, pins=pins, dynamic_shapes={"input_ids": DIMS})
    loaded = through_a_file(tmp_path / "m.pt2", program)
    for batch, seq in ((2, 6), (3, 5), (5, 11)):
        equal(loaded, model, (), {"input_ids": torch.randint(0, 50257, (batch, seq))})
    with pytest.raises(SizesError, match=r"seq > 1 .*sdpa_attention.py"):  # a line of the model
        equal(loaded, model, (), {"input_ids": torch.randint(0, 50257, (2, 1))})
