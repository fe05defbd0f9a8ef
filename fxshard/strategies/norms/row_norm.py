"""Decomposed layer and group norm (``ops.norms.row_norm``): every dim can be sharded; normalised ones leave pending sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import SUMS, Factors, Rule, factors, is_one, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.norms.normalization import spread_over
from fxshard.strategies.tensors.dims import named


def aligned_right(*groups: Sequence[int]) -> Rule:
    """All tensors align with the last dims of the largest operand; dims of size 1 have no factor.

    A tensor with one more dim has it in front; that dim stays whole.
    ``groups``: argument positions in which the operator is jointly linear.
    """

    def rule(call: Call) -> Factors:
        widest = max(call.operands[:3], key=lambda meta: meta.ndim)
        names = named(widest.ndim)

        def of(meta: Any) -> list[str]:
            front = ["parts!"] * (meta.ndim - widest.ndim)
            own = names[max(0, widest.ndim - meta.ndim) :]
            return front + ["" if is_one(size) else name for size, name in zip(meta.shape[len(front) :], own, strict=True)]

        return factors([of(o) for o in call.operands], [of(call.outputs[0])], linear=linear_groups(call, groups))

    return rule


def normalise(call: Call) -> Factors:
    """(x - mean) rstd weight + bias: linear in (x, mean, bias), and in (weight, bias); without a weight only averages of the bias pass."""
    given = isinstance(call.arg(3), Operand)
    affine = linear_groups(call, [(3, 4)], SUMS if given else ("avg",))
    return replace(aligned_right((0, 1, 4))(call), linear=(*affine, *linear_groups(call, [(0, 1, 4)])))


def weight_sum(call: Call) -> Factors:
    """(grad, x, mean, rstd, dims) -> the sum over dims, which are removed."""
    names = named(call.operands[0].ndim)
    operands = [["" if is_one(size) else name for size, name in zip(o.shape, names, strict=True)] for o in call.operands]
    kept = [name for d, name in enumerate(names) if d not in call.arg(4)]
    return factors(operands, [kept], linear=linear_groups(call, [(0,)]))


register("fxshard.row_sum.default", aligned_right((0,)))
register("fxshard.row_mean.default", aligned_right((0,)))
register("fxshard.row_spread.default", aligned_right(), local=lambda ctx: spread_over(ctx, ctx.args[3], keepdim=True))
register("fxshard.row_rstd.default", aligned_right())
register("fxshard.row_normalise.default", normalise)
register("fxshard.row_norm_sums.default", aligned_right((0,), (4,)))
register("fxshard.row_norm_backward.default", aligned_right((0, 5)))
register("fxshard.row_norm_weight.default", weight_sum)
