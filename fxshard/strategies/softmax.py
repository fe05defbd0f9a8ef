"""Softmax along one dim, which stays whole; its gradient is linear in the gradient that comes in."""

from __future__ import annotations

from fxshard.strategies.call import Call
from fxshard.strategies.dims import named, normal_dims
from fxshard.strategies.factors import Factors, Rule, factors, linear_groups
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register


def along_dim(position: int, *groups: tuple[int, ...]) -> Rule:
    """All tensors of one shape; the dim in argument ``position`` is whole."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        dims = named(ndim, normal_dims(call.arg(position, "dim"), ndim))
        return factors([dims] * len(call.operands), [dims], linear=linear_groups(call, groups))

    return rule


register(names("_softmax _log_softmax softmax.int log_softmax.int _safe_softmax"), along_dim(1))
register(names("_softmax_backward_data _log_softmax_backward_data"), along_dim(2, (0,)))
