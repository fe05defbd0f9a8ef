"""Layer and group norm in parts (``ops.norms.row_norm``): every dim is free, a cut one that is normalised leaves sums pending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import SUMS, Factors, Rule, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.dims import named


def aligned(*groups: Sequence[int]) -> Rule:
    """All tensors align with the last dims of the largest, and what is of size 1 there has no factor.

    A tensor of one dim more than that has its parts in front, which are not cut.
    ``groups``: positions of arguments that it is linear in together.
    """

    def rule(call: Call) -> Factors:
        widest = max(call.operands[:3], key=lambda meta: meta.ndim)
        names = named(widest.ndim)

        def of(meta: Any) -> list[str]:
            front = ["parts!"] * (meta.ndim - widest.ndim)
            own = names[max(0, widest.ndim - meta.ndim) :]
            return front + ["" if size == 1 else name for size, name in zip(meta.shape[len(front) :], own, strict=True)]

        return factors([of(o) for o in call.operands], [of(call.outputs[0])], linear=linear_groups(call, groups))

    return rule


def normalise(call: Call) -> Factors:
    """(x - mean) rstd weight + bias: affine in weight and bias, of which a mean of the bias alone is one of the result."""
    given = isinstance(call.arg(3), Operand)
    affine = linear_groups(call, [(3, 4)], SUMS if given else ("avg",))
    return replace(aligned((0, 1, 4))(call), linear=(*affine, *linear_groups(call, [(0, 1, 4)])))


def weight_sum(call: Call) -> Factors:
    """(grad, x, mean, rstd, dims) -> the sum over dims, without them."""
    names = named(call.operands[0].ndim)
    operands = [["" if size == 1 else name for size, name in zip(o.shape, names, strict=True)] for o in call.operands]
    kept = [name for d, name in enumerate(names) if d not in call.arg(4)]
    return factors(operands, [kept], linear=linear_groups(call, [(0,)]))


def local_spread(ctx: LocalContext) -> Any:
    """Where the dims are whole, torch's own variance: it reads x once, and alongside the sum."""
    x, meta, dims = ctx.inputs[0], ctx.call.operands[0], ctx.args[3]
    if any(x.axes_on(d) for d in dims) or meta.dtype.itemsize < 4:
        return unchanged(ctx)
    variance = ctx.emit(torch.ops.aten.var.correction, ctx.args[0], dims, correction=0, keepdim=True)
    return ctx.emit(torch.ops.aten.mul.Tensor, variance, ctx.args[2])


register("fxshard.row_sum.default", aligned((0,)))
register("fxshard.row_mean.default", aligned((0,)))
register("fxshard.row_spread.default", aligned(), local=local_spread)
register("fxshard.row_rstd.default", aligned())
register("fxshard.row_normalise.default", normalise)
register("fxshard.row_norm_sums.default", aligned((0,), (4,)))
register("fxshard.row_norm_backward.default", aligned((0, 5)))
register("fxshard.row_norm_weight.default", weight_sum)
