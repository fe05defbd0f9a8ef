"""A process that dies at any moment of a save leaves a complete checkpoint: the previous one or the new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMS = {"folder": {}, "whole.safetensors": {}}
SYSTEM_CALLS = ("open", "fsync", "replace", "mkdir", "unlink", "rmdir")


class Gone(BaseException):
    """Stands for a SIGKILL: ``except Exception`` does not catch it."""


def run(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def content(path: Path) -> tuple[int, float, float]:
    """(step, one weight, one momentum value) of the checkpoint; all three must be of the same save."""
    model, optimizer = run(0.0)
    extra = fxshard.load_checkpoint(path, model, optimizer)
    return extra["step"], round(float(model.weight.detach()[0, 0]), 4), float(optimizer.state[model.weight]["momentum_buffer"][0, 0])


def save(path: Path, step: int, value: float, last_call: int | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Saves, and dies after ``last_call`` system calls if that is given. Returns how many there were."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if last_call is not None and calls >= last_call:
                raise Gone
            calls += 1
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr("builtins.open", counted(open))
        fxshard.save_checkpoint(path, *run(value), extra={"step": step})
    return calls


@pytest.mark.parametrize("form", FORMS)
def test_death_at_any_system_call(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old, new = tmp_path / form, (1, 0.9, 1.0), (2, 4.9, 1.0)
    calls = save(path, 1, 1.0, None, monkeypatch)
    assert calls > 5
    seen = []
    for last in range(calls + 8):
        save(path, 1, 1.0, None, monkeypatch)
        try:
            save(path, 2, 5.0, last, monkeypatch)
        except Gone:
            seen.append(content(path))
            assert seen[-1] in (old, new)
        else:
            break
    assert content(path) == new
    assert seen[0] == old
    assert seen == sorted(seen)  # once the new checkpoint is valid it stays
    assert {f.name for f in tmp_path.iterdir()} == {form}  # the next save removes what an interrupted one left


def test_an_interrupted_first_save_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Gone):
        save(tmp_path / "new", 1, 1.0, 3, monkeypatch)
    with pytest.raises(fxshard.FxshardError, match="no finished checkpoint"):
        content(tmp_path / "new")
    fxshard.save_checkpoint(tmp_path / "torch", *run(1.0), extra={"step": 1}, format="dcp")
    assert content(tmp_path / "torch") == (1, 0.9, 1.0)
    assert {f.name for f in tmp_path.iterdir()} == {"new", "torch"}
