"""The losses of a way beside one device's, before it is timed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.training.peers import Contestant, Setting, alone

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The largest relative difference of a loss: float32 with another order of sums, bfloat16 with 8 bits."""

STEPS = 3
"""Steps whose losses are compared, which also warm up; from the second on, losses depend on the gradients."""


def difference(way: Contestant, setting: Setting) -> float:
    """The largest relative difference of the losses of the first steps of SGD."""
    losses = [mean_loss(way.step(), setting) for _ in range(STEPS)]
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference(setting), strict=True))


def disagreement(found: float, setting: Setting) -> str:
    """The error of a way whose losses differ by ``found``, or ""."""
    limit = TOLERANCES[setting.dtype]
    return "" if found <= limit else f"the losses differ by {found:.2g}, more than {limit:g}"  # not a number is wrong too


@functools.cache
def reference(setting: Setting) -> list[float]:
    """The losses of the first steps on one device, without compiling."""
    way = alone(setting, compiled=False)
    return [float(way.step()) for _ in range(STEPS)]


def mean_loss(loss: Any, setting: Setting) -> float:
    """The mean over the ranks: each has the loss of its own rows, or of all."""
    value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).clone()
    dist.all_reduce(value)
    return float(value) / setting.mesh.size()


def first_error(own: str) -> str:
    """The error of the first rank that has one, the same on all ranks: they then time the same ways. A rank that raised within a collective
    leaves the others there; they raise after the group's time limit."""
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return next((f"rank {rank}: {error}" for rank, error in enumerate(everyone) if error), "")
