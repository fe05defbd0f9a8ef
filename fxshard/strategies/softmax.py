"""Along one dim, which stays whole: softmax, gated linear units; gradients are linear in the gradient that comes in."""

from __future__ import annotations

from fxshard.call import Call
from fxshard.strategies.dims import normal_dims
from fxshard.strategies.factors import Factors, Rule, factors, linear_groups
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register


def along_dim(position: int, *groups: tuple[int, ...]) -> Rule:
    """All dims shared but the one in argument ``position``, which is whole and may differ in size."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        whole = normal_dims(call.arg(position, "dim", -1), ndim)
        tensors = [[f"w{t}!" if d in whole else f"d{d}" for d in range(ndim)] for t in range(len(call.operands) + 1)]
        return factors(tensors[:-1], tensors[-1:], linear=linear_groups(call, groups))

    return rule


register(names("_softmax _log_softmax _safe_softmax"), along_dim(1))
register(names("_softmax_backward_data _log_softmax_backward_data"), along_dim(2, (0,)))
register(names("glu"), along_dim(1))
register(names("glu_backward"), along_dim(2, (0,)))
