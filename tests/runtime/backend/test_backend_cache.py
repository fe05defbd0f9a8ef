"""The backend in a new process: the joint graph comes from the file that another process wrote."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.passes.trace import trace
from tests.distributed.scenarios import run_scenarios

ROOT = Path(__file__).resolve().parents[3]


def joint_graphs_of_a_step() -> int:
    """How many joint graphs a training step traces. Its gradients are those of eager torch."""
    made: list[int] = []
    real = trace.aot_export_joint_with_descriptors
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    x, labels = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))

    def loss(x: Tensor) -> Tensor:  # outside of any module
        return nn.functional.cross_entropy(model(x), labels)

    expected = torch.autograd.grad(loss(x), list(model.parameters()))
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "aot_export_joint_with_descriptors", lambda *a, **k: made.append(1) or real(*a, **k))
        options = {"mesh": fxshard.Mesh({"dp": 1}), "compiler": "eager"}
        value = torch.compile(loss, backend="fxshard", options=options)(x)
    for found, right in zip(torch.autograd.grad(value, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    return len(made)


def writes_the_file(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in on(folder).items():
            patch.setenv(name, value)
        assert joint_graphs_of_a_step() == 1


def on(folder: str) -> dict[str, str]:
    """The environment that turns the cache on."""
    return {"FXSHARD_CACHE": "1", "FXSHARD_CACHE_DIR": folder}


@pytest.mark.distributed
def test_the_joint_graph_comes_from_a_file(tmp_path: Path) -> None:
    """One process is forked, so that other tests have changed nothing in it; the other is fresh and has another order of sets."""
    folder = str(tmp_path / "cache")
    said = run_scenarios({"first": functools.partial(writes_the_file, folder)}, 1, tmp_path)
    assert not said["first"], said["first"]
    again = f"from {__name__} import joint_graphs_of_a_step as traced; print('made', traced())"
    environment = {**os.environ, **on(folder), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-2:] == ["made", "0"]
