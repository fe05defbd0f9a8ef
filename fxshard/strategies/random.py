"""Random operators: each rank draws for the whole tensor and cuts its shard out, so every dim is free."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.call import Call
from fxshard.strategies.dims import named
from fxshard.strategies.factors import Factors, factors, replicate_all
from fxshard.strategies.local import LocalContext
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register

aten = torch.ops.aten


def dropout(call: Call) -> Factors:
    """x, seed -> x masked and scaled, mask: every dim free."""
    dims = named(call.operands[0].ndim)
    return factors([dims, []], [dims, dims])


def random(call: Call) -> Factors:
    """seed -> numbers: every dim free."""
    (out,) = call.outputs
    assert out is not None
    return factors([[]], [named(out.ndim)])


def local_dropout(ctx: LocalContext) -> Any:
    """The same mask on every mesh: drawn at the global shape, cut at the shard's offsets."""
    import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

    x, p, seed, call = ctx.args
    shape = ctx.call.operands[0].shape
    offsets = _offsets(ctx, seed, [ctx.input_offset(0, d) for d in range(len(shape))])
    return ctx.emit(torch.ops.fxshard.dropout_shard.default, x, p, seed, call, list(shape), offsets)


def local_random(ctx: LocalContext) -> Any:
    """The same numbers on every mesh, on the device where the program runs."""
    import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

    kind, low, high, shape, dtype, seed, call = ctx.args
    args, cpu = (kind, low, high, list(shape), dtype, seed, call), torch.device("cpu")
    places = [ctx.output_offset(0, d) for d in range(len(shape))]
    if all(isinstance(place, int) for place in places):
        return ctx.emit(torch.ops.fxshard.random.default, *args, device=cpu)
    sizes = list(ctx.output_shape())
    return ctx.emit(torch.ops.fxshard.random_shard.default, *args, sizes, _offsets(ctx, seed, places), device=cpu)


def _offsets(ctx: LocalContext, seed: Any, places: list[Any]) -> list[Any]:
    """All as scalar tensors."""
    return [ctx.emit(aten.new_full.default, seed, [], place) if isinstance(place, int) else place for place in places]


def whole(call: Call) -> Factors:
    return replicate_all(call, "its random numbers are drawn for the whole tensor, so it is replicated")


register("fxshard.dropout.default", dropout, local=local_dropout)
register("fxshard.random.default", random, local=local_random)
register("fxshard.rng_seed.default", whole)
register(names("exponential uniform normal_functional bernoulli bernoulli.p native_dropout multinomial"), whole)
register(names("rand randn randint randint.low randperm rand_like randn_like"), whole)
