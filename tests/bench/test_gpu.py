"""bench.gpu over gloo, as far as it goes without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import main

WAYS = ["DDP, eager", "by hand, Megatron's layouts, eager", "fxshard, Megatron's layouts"]
TOLERANCE = 1e-5
"""Relative, float32."""


def test_the_checks_run_over_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    chosen = ["--device", "cpu", "--rounds", "1", "--size", "32/16", "-o", str(output)]
    assert main([*chosen, *(text for name in WAYS for text in ("--only", name))]) == 0
    found = json.loads(output.read_text())
    assert list(found["ways"]) == WAYS
    for way in found["ways"].values():
        assert way["error"] == ""
        assert 0 <= way["numerics"] < TOLERANCE
        assert way["ms"] > 0
    assert found["ways"]["fxshard, Megatron's layouts"]["price_ratio"] > 0
    assert "Megatron" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu.json"
    assert main(["-o", str(output)]) == 0
    assert "no GPU here" in capsys.readouterr().out
    assert not output.exists()
