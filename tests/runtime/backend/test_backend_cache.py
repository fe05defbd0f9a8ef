"""The backend in a new process: the joint graph comes from the file that another process wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxshard
from fxshard.passes.trace import trace


@pytest.mark.parametrize("cache", [True, False])
def test_the_joint_graph_comes_from_a_file(cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_CACHE", "1")
    monkeypatch.setenv("FXSHARD_CACHE_DIR", str(tmp_path / "cache"))
    made: list[int] = []
    real = trace.aot_export_joint_with_descriptors
    monkeypatch.setattr(trace, "aot_export_joint_with_descriptors", lambda *a, **k: made.append(1) or real(*a, **k))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for _ in range(2):
        torch._dynamo.reset()  # as in a new process
        options = {"mesh": fxshard.Mesh({"dp": 1}), "compiler": "eager", "cache": cache}
        loss = torch.compile(model, backend="fxshard", options=options)(x).square().sum()
        for found, right in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    assert len(made) == (1 if cache else 2)
