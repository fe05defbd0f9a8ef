"""``bench.models``: the check notices wrong numbers, models compute in float64, and the report counts what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.models import check as checks
from bench.models.catalogue import CATALOGUE
from bench.models.float64 import _Loader
from bench.models.report import failures, is_wrong, lines_of, write_report


@pytest.fixture
def one_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MESHES", ("a=2",))


@pytest.mark.usefixtures("one_mesh")
def test_a_model_that_equals_one_device() -> None:
    record = checks.check("perceptron")
    assert [(c["mesh"], c["plan"], c["error"]) for c in record["cells"]] == [("a=2", p, "") for p in ("solver", "random 0", "random 1")]
    assert record["cells"][0]["gap"] == 0 and all(c["collectives"] for c in record["cells"]) and not failures(record)


@pytest.mark.usefixtures("one_mesh")
def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device computes with another weight."""
    right = checks._one_device

    def wrong(model: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad():
            model.layers[0].weight[0, 0] += 1e-6
        found = right(model, args, kwargs)
        with torch.no_grad():
            model.layers[0].weight[0, 0] -= 1e-6
        return found

    monkeypatch.setattr(checks, "_one_device", wrong)
    record = checks.check("perceptron")
    assert is_wrong(record) and all(c["error"].startswith("AssertionError: output 0 is off by") for c in record["cells"])
    assert len(failures(record)) == 3


def test_a_module_reads_float64_for_float32(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    line = 'def f(x): return x.float(), x.to(torch.float32), torch.zeros(1, dtype=torch.float), float("1"), "float32"'
    path.write_text(f"import torch\n{line}\n")
    loader = _Loader("model", str(path))
    found: dict[str, Any] = {}
    exec(loader.get_code("model"), found)
    *tensors, number, name = found["f"](torch.ones(1, dtype=torch.float16))
    assert {t.dtype for t in tensors} == {torch.float64} and number == 1.0 and name == "float64"


def record(name: str, *errors: str) -> dict[str, Any]:
    cell = {"mesh": "a=4", "plan": "solver", "gap": 0.01, "seconds": 2.0, "simulate": 1.0, "collectives": 3}
    return {"key": name, "nodes": 9, "trace": 1.0, "whole": ["aten.sort"], "error": "", "cells": [cell | {"error": e} for e in errors]}


def test_the_report(tmp_path: Path) -> None:
    found = [
        record("llama", "", ""),
        record("bert", "", "AssertionError: output 0 is off by 1"),
        record("vit") | {"error": "TraceError: no"},
    ]
    pairs = [{"key": "llama", "parallelize": "", "backend": "rank 1: no", "generate": None, "seconds": 3.0}]
    write_report(tmp_path / "models.md", found, pairs)
    text = (tmp_path / "models.md").read_text()
    assert "**1 of 3 models pass under all plans.** With wrong numbers: 1." in text
    assert "- **bert**, a=4, solver: AssertionError: output 0 is off by 1" in text and "- **vit**, before planning: TraceError: no" in text
    assert "Not measured: perceptron, " in text and "- **llama**, backend: rank 1: no" in text and " 1.00 " in lines_of(found)[0]


def test_there_are_enough_models_of_every_library() -> None:
    names = {family.name for family in CATALOGUE}
    assert len(names) == len(CATALOGUE) >= 60
    assert {"llama", "t5", "vit", "whisper", "clip", "mixtral", "mamba", "unet", "dit", "nanogpt", "nn.LSTM", "nn.Transformer"} <= names
    assert {name.split()[0] for name in names} >= {"timm", "torchvision", "peft"}
