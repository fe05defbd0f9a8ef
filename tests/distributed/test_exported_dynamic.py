"""A model exported for any size, on two gloo ranks in fresh processes that never import its code: it is compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fxshard
from examples.llama import Llama
from tests.distributed.fresh import run_fresh

SIZES = ((4, 8), (5, 5), (7, 11))
RANK = """
from torch._dynamo.utils import counters
compiled = lambda: sum(counters["inductor"][k] for k in ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass"))
model = fxshard.load(folder + "/m.pt2").bind(mesh)
assert compiled() == 1, dict(counters["inductor"])
out = {name: model(tokens).contiguous() for name, tokens in load_file(folder + "/inputs.safetensors").items()}
assert compiled() == 1, "another size was compiled"
try:
    model(torch.zeros(50, 4, dtype=torch.int64))
except fxshard.errors.SizesError as error:
    assert "batch is 50, it must be from 2 to 40" in str(error), error
else:
    raise AssertionError("a size out of range was accepted")
assert torch.equal(model(load_file(folder + "/inputs.safetensors")["0"]), out["0"]), "the ranks continue after a refusal"
"""


@pytest.mark.distributed
def test_fresh_processes_give_the_same_outputs_at_any_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Llama.small(layers=1)
    tokens = [torch.randint(0, 256, size) for size in SIZES]
    batch = torch.export.Dim("batch", min=2, max=40)
    mesh = fxshard.Mesh({"tp": 2}, hardware="cpu")
    program = fxshard.export(model, (tokens[0],), mesh, input_layouts="S(0)", dynamic_shapes=({0: batch, 1: "seq"},))
    assert program.collectives and all(one.unit == 1 for one in program.sizes)
    program.save(tmp_path / "m.pt2")
    save_file({str(i): x for i, x in enumerate(tokens)}, tmp_path / "inputs.safetensors")
    run_fresh(RANK, tmp_path)
    for rank in range(2):
        found = load_file(tmp_path / f"out{rank}.safetensors")
        for i, x in enumerate(tokens):
            with torch.no_grad():
                torch.testing.assert_close(found[str(i)], model(x), rtol=1e-5, atol=1e-5)
