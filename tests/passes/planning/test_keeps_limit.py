"""A plan keeps a memory limit that it reaches exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import fxshard
from fxshard.passes.planning.choose import keeps_limit


def test_the_limit_itself_is_allowed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    free = fxshard.plan(model, (torch.randn(4, 8),), fxshard.Mesh({"a": 2}), cache=False)
    needed = sum(free.memory.values())
    assert keeps_limit(free) and keeps_limit(replace(free, memory_limit=needed))
    assert not keeps_limit(replace(free, memory_limit=needed - 1))
    within = fxshard.plan(model, (torch.randn(4, 8),), fxshard.Mesh({"a": 2}), memory_limit=needed, cache=False)
    assert within.objective == free.objective
