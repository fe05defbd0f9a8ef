"""Random operators. Dropout draws its mask for the whole tensor and cuts the shard out; other draws stay whole."""

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


def local_dropout(ctx: LocalContext) -> Any:
    """The same mask on every mesh: drawn at the global shape, cut at the shard's offsets."""
    import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)

    x, p, seed, call = ctx.args
    shape = ctx.call.operands[0].shape
    places = [ctx.input_offset(0, d) for d in range(len(shape))]
    offsets = [ctx.emit(aten.new_full.default, seed, [], o) if isinstance(o, int) else o for o in places]
    return ctx.emit(torch.ops.fxshard.dropout_shard.default, x, p, seed, call, list(shape), offsets)


def whole(call: Call) -> Factors:
    return replicate_all(call, "its random numbers are drawn for the whole tensor, so it is replicated")


register("fxshard.dropout.default", dropout, local=local_dropout)
register("fxshard.rng_seed.default", whole)
register(names("exponential uniform normal_functional bernoulli bernoulli.p native_dropout multinomial"), whole)
register(names("rand randn randint randint.low randperm rand_like randn_like"), whole)
