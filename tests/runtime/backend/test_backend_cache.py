"""The backend in a new process: the joint graph comes from the file that another process wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from torch import nn
import fxshard
from fxshard.passes.trace import trace

made = []
real = trace.aot_export_joint_with_descriptors
trace.aot_export_joint_with_descriptors = lambda *a, **k: made.append(1) or real(*a, **k)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
x, labels = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))


def loss(x):  # outside of any module
    return nn.functional.cross_entropy(model(x), labels)


expected = torch.autograd.grad(loss(x), list(model.parameters()))
options = {"mesh": fxshard.Mesh({"dp": 1}), "compiler": "eager"}
value = torch.compile(loss, backend="fxshard", options=options)(x)
for found, right in zip(torch.autograd.grad(value, list(model.parameters())), expected, strict=True):
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
print("made", len(made))
"""


def test_the_joint_graph_comes_from_a_file(tmp_path: Path) -> None:
    environment = {**os.environ, "FXSHARD_CACHE": "1", "FXSHARD_CACHE_DIR": str(tmp_path)}
    run = [
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert [out.split()[-2:] for out in run] == [["made", "1"], ["made", "0"]]
