"""fxshard's ways to run the step: with Megatron's, FSDP's or DDP's layouts pinned, or without pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

import fxshard
from bench.training.peers import Contestant, Setting, mine, stepping


def _parallelized(setting: Setting, inputs: tuple[Any, ...], **options: Any) -> Contestant:
    model: Any = fxshard.parallelize(setting.model, inputs, setting.mesh, hardware=setting.hardware, **options)
    held = tuple(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return Contestant(stepping(model, inputs), model.forward.programs[0], held)


def _local(setting: Setting) -> tuple[Any, ...]:
    return tuple(fxshard.local_batch(x, setting.mesh, axis="dp", size=setting.rows) for x in mine(setting))


def _all(setting: Setting, layout: str) -> dict[str, str]:
    return {name: layout for name, _ in setting.model.named_parameters()}


def megatron(setting: Setting, **options: Any) -> Contestant:
    return _parallelized(setting, setting.batch, pins=setting.family.megatron(setting.model), **options)


def sharded(setting: Setting, **options: Any) -> Contestant:
    """All weights and the batch are sharded, as in FSDP."""
    return _parallelized(setting, _local(setting), pins=_all(setting, "S(0)"), **options)


def replicated(setting: Setting, **options: Any) -> Contestant:
    """All weights are replicated and the batch is sharded, as in DDP."""
    return _parallelized(setting, _local(setting), pins=_all(setting, "R"), **options)


def free(setting: Setting, **options: Any) -> Contestant:
    """Each rank passes the whole batch, and nothing is pinned."""
    return _parallelized(setting, setting.batch, **options)


OURS: dict[str, Callable[..., Contestant]] = {
    "fxshard, Megatron's layouts": megatron,
    "fxshard, FSDP's layouts": sharded,
    "fxshard, DDP's layouts": replicated,
    "fxshard, its own choice": free,
}
