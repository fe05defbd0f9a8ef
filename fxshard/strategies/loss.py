"""Negative log likelihood: loss = -sum_n weight[t_n] x[n, t_n]; the classes stay whole, the batch leaves a pending sum."""

from __future__ import annotations

from fxshard.strategies.call import Call
from fxshard.strategies.factors import Factors, factors, linear_groups
from fxshard.strategies.registry import register

NONE, MEAN, SUM = 0, 1, 2


def _dims(call: Call, x: int, reduction: int) -> tuple[list[str], list[str]]:
    """Dims of x and of the target; a mean needs the whole batch for its divisor."""
    mark = "!" if reduction == MEAN else ""
    rest = [f"s{i}{mark}" for i in range(call.operands[x].ndim - 2)]
    batch = [f"n{mark}"] if call.operands[x].ndim > 1 else []
    return [*batch, "c!", *rest], [*batch, *rest]


def forward(call: Call) -> Factors:
    """x [n c s...], target [n s...], weight [c] -> loss, total weight: both sums over the batch."""
    reduction = call.arg(3)
    x, target = _dims(call, 0, reduction)
    operands = [x, target, ["c!"]][: len(call.operands)]
    return factors(operands, [target if reduction == NONE else [], []])


def backward(call: Call) -> Factors:
    """Linear in the gradient; the total weight is whole."""
    reduction = call.arg(4)
    x, target = _dims(call, 1, reduction)
    grad = target if reduction == NONE else []
    weight = [["c!"]] if call.meta(3) is not None else []
    return factors([grad, x, target, *weight, []], [x], linear=linear_groups(call, [(0,)]))


register(["aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default"], forward)
register(["aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default"], backward)
