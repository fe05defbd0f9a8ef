"""flex_attention compiled for an absent H100: torch's Triton template runs it, forward and backward, on a shard of the queries."""

from __future__ import annotations

import json

import pytest

from tests.runtime.target.test_compile_for import ROOT, needs_triton, run


@needs_triton
@pytest.mark.slow
def test_torchs_template_runs_each_layer() -> None:
    done = run(str(ROOT / "tests/runtime/target/flex_model.py"))
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["specs"]["flex_attention"].endswith("-> S(0)S(2), S(0)S(2), S(0)S(2)")
    for graph in said["report"]["graphs"]:
        assert graph["failures"] == []
        templates = [kernel["name"] for kernel in graph["kernels"] if kernel["name"].startswith("triton_tem") and "flex" in kernel["name"]]
        assert templates, graph["kernels"]
        assert not [name for name, _ in graph["calls"] if "fxshard" in name]
