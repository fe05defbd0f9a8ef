"""A model exported for all sizes, on two gloo ranks in fresh processes that never see its code: one compilation, any size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fxshard
from examples.llama import Llama

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((4, 8), (5, 5), (7, 11))
RANK = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from safetensors.torch import load_file, save_file
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
import fxshard
from torch._dynamo.utils import counters
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
compiled = lambda: sum(counters["inductor"][k] for k in ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass"))
model = fxshard.load(folder + "/m.pt2").bind(mesh)
assert compiled() == 1, dict(counters["inductor"])
out = {name: model(tokens).contiguous() for name, tokens in load_file(folder + "/inputs.safetensors").items()}
assert compiled() == 1, "another size was compiled"
try:
    model(torch.zeros(50, 4, dtype=torch.int64))
except fxshard.errors.SizesError as error:
    assert "batch is 50, it may be from 2 to 40" in str(error), error
else:
    raise AssertionError("a size out of range was taken")
assert torch.equal(model(load_file(folder + "/inputs.safetensors")["0"]), out["0"]), "after a refusal the ranks go on"
assert fxshard.__file__ == sys.argv[3], "another fxshard than the one under test"
assert not any(name.split(".")[0] in ("transformers", "zoo", "tests", "examples") for name in sys.modules), "the model's code was imported"
save_file(out, f"{folder}/out{rank}.safetensors")
dist.barrier()
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
    for rank in range(2):
        found = load_file(tmp_path / f"out{rank}.safetensors")
        for i, x in enumerate(tokens):
            with torch.no_grad():
                torch.testing.assert_close(found[str(i)], model(x), rtol=1e-5, atol=1e-5)
