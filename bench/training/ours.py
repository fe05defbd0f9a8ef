"""fxshard's ways to run the step: with Megatron's, FSDP's or DDP's layouts pinned, or without pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

import fxshard
from bench.training.peers import Contestant, Setting, mine, stepping

MEGATRON = {
    "tok_embeddings.weight": "S(1)",
    "layers.*.attention.w[qkv].weight": "S(0)",
    "layers.*.attention.wo.weight": "S(1)",
    "layers.*.feed_forward.w[13].weight": "S(0)",
    "layers.*.feed_forward.w2.weight": "S(1)",
    "*norm.weight": "R",
    "output.weight": "S(0)",
}


def _parallelized(setting: Setting, inputs: tuple[Any, ...], **options: Any) -> Contestant:
    model: Any = fxshard.parallelize(setting.model, inputs, setting.mesh, hardware=setting.hardware, **options)
    held = tuple(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return Contestant(stepping(model, inputs), model.forward.programs[0], held)


def _local(setting: Setting) -> tuple[Any, ...]:
    return tuple(fxshard.local_batch(x, setting.mesh, axis="dp", size=setting.rows) for x in mine(setting))


def megatron(setting: Setting) -> Contestant:
    return _parallelized(setting, setting.batch, pins=MEGATRON)


def sharded(setting: Setting) -> Contestant:
    """All weights and the batch are sharded, as in FSDP."""
    pins = {"*norm.weight": "S(0)", "tok_embeddings.weight": "S(0)", "output.weight": "S(0)", "layers.*.w?.weight": "S(0)"}
    return _parallelized(setting, _local(setting), pins=pins)


def replicated(setting: Setting) -> Contestant:
    """All weights are replicated and the batch is sharded, as in DDP."""
    return _parallelized(setting, _local(setting), pins={"*weight": "R"})


def free(setting: Setting) -> Contestant:
    """Each rank passes the whole batch, and nothing is pinned."""
    return _parallelized(setting, setting.batch)


OURS: dict[str, Callable[[Setting], Contestant]] = {
    "fxshard, Megatron's layouts": megatron,
    "fxshard, FSDP's layouts": sharded,
    "fxshard, DDP's layouts": replicated,
    "fxshard, its own choice": free,
}
