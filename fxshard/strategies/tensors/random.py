"""Random operators: a random number depends only on its element's global index, so every dim can be sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, factors, replicate_all
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register
from fxshard.strategies.tensors.dims import named
from fxshard.strategies.tensors.pointwise import aten_names


def dropout(call: Call) -> Factors:
    """x, seed -> x masked and scaled, mask."""
    dims = named(call.operands[0].ndim)
    return factors([dims, []], [dims, dims])


def random(call: Call) -> Factors:
    """seed -> random numbers."""
    return factors([[]], [named(call.output.ndim)])


def local_dropout(ctx: LocalContext) -> Any:
    """The shard of the mask, drawn at its global offset."""
    import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

    x, p, seed, call = ctx.args[:4]
    shape = list(ctx.call.operands[0].shape)
    return ctx.emit(torch.ops.fxshard.dropout_shard.default, x, p, seed, call, shape, *_cut(len(shape), partial(ctx.input_offset, 0)))


def local_random(ctx: LocalContext) -> Any:
    """The shard of one draw, on the device where the program runs."""
    import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

    kind, low, high, shape, dtype, seed, call = ctx.args
    sizes, cut = list(ctx.output_shape()), _cut(len(shape), partial(ctx.output_offset, 0))
    args = (kind, low, high, list(shape), dtype, seed, call, sizes, *cut)
    return ctx.emit(torch.ops.fxshard.random_shard.default, *args, device=torch.device("cpu"))


def _cut(ndim: int, offset: Callable[[int], Any]) -> tuple[list[int], list[Any]]:
    """The sharded dims, and the shard's offset on each: a run-time scalar."""
    places = {d: offset(d) for d in range(ndim)}
    found = {d: place for d, place in places.items() if not isinstance(place, int)}
    return list(found), list(found.values())


def whole(call: Call) -> Factors:
    return replicate_all(call, "its random numbers are drawn for the whole tensor, so it is replicated")


register("fxshard.dropout.default", dropout, local=local_dropout)
register("fxshard.random.default", random, local=local_random)
register("fxshard.rng_seed.default", whole)
register(aten_names("exponential uniform normal_functional bernoulli bernoulli.p native_dropout multinomial"), whole)
register(aten_names("rand randn randint randint.low randperm rand_like randn_like"), whole)
