"""Mixtures of experts, with rows in the order of tokens: each token has k rows, of which row j is for expert ids[t, j].

Tokens are sharded as in any operator: then each rank computes its own tokens' rows with all experts, and the gradients of their matrices
are pending sums. With sharded experts and whole tokens, a rank computes the rows of its own experts, and gives zeros for all others: a
pending sum.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.packed import by_factor
from fxshard.strategies.engine.registry import register, replaced

aten = torch.ops.aten


def to_experts(call: Call) -> Factors:
    """(rows [t j h], ids [t j]) -> both."""
    both = [["t", "j", "h"], ["t", "j"]]
    return factors(both, both, linear=linear_groups(call, [(0,)]), depends=((0,), (1,)))


def from_experts(call: Call) -> Factors:
    """(rows [t j h], ids [t j]) -> rows."""
    rows = ["t", "j", "h"]
    return factors([rows, ["t", "j"]], [rows], linear=linear_groups(call, [(0,)]), depends=((0,),))


def linear(call: Call) -> Factors:
    """(x [t j m], weight [e m n], ids [t j]) -> [t j n], a sum over m and e."""
    operands = [["t", "j", "m"], ["e", "m", "n"], ["t", "j"]]
    return factors(operands, [["t", "j", "n"]], linear=linear_groups(call, [(0,), (1,)]))


def outer(call: Call) -> Factors:
    """(x [t j m], grad [t j n], ids [t j]) -> [e m n], a sum over t and j."""
    operands = [["t", "j", "m"], ["t", "j", "n"], ["t", "j"]]
    return factors(operands, [["e", "m", "n"]], linear=linear_groups(call, [(0,), (1,)]))


def local_rows(ctx: LocalContext) -> Any:
    """Rows of the rank's own tokens stay where they are."""
    return ctx.args[:2]


def local_linear(ctx: LocalContext) -> Any:
    x, weight, ids = ctx.args
    return ctx.emit(ctx.target, x, weight, _counted_from(ctx, ids, ctx.input_offset(1, 0)))


def local_outer(ctx: LocalContext) -> Any:
    ids = _counted_from(ctx, ctx.args[2], ctx.output_offset(0, 0))
    return ctx.emit(ctx.target, *replaced(ctx.args, {2: ids, 3: ctx.output_shape()[0]}))


def _counted_from(ctx: LocalContext, ids: Any, first: Any) -> Any:
    """The ids counted from the rank's first expert; those of other ranks' experts are then out of range."""
    return ids if isinstance(first, int) else ctx.emit(aten.sub.Tensor, ids, first)


register("fxshard.to_experts.default", to_experts, local=local_rows)
register("fxshard.from_experts.default", from_experts, local=lambda ctx: ctx.args[0])
register("fxshard.expert_linear.default", linear, local=local_linear, packed=by_factor)
register("fxshard.expert_outer.default", outer, local=local_outer, packed=by_factor)
