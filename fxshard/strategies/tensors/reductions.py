"""Reductions: out = reduce over some dims of x; a reduced dim may be sharded where the reduction can be finished later."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import SUMS, Factors, Rule, factors, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.tensors.dims import named, normal_dims
from fxshard.strategies.tensors.pointwise import names


def reduction(reduce: str | None, passes: tuple[str, ...] = (), dim: int | None = 1, keepdim: int = 2, default: Any = None) -> Rule:
    """A reduction over the dims in argument ``dim`` (``default`` where it is missing; None for all).

    ``reduce``: what a sharded dim leaves, None if it must stay whole; ``passes``: pending reductions that pass through;
    ``keepdim``: position of that argument.
    """

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        gone = set(normal_dims(None if dim is None else call.arg(dim, "dim", default), ndim))
        ins = named(ndim, gone if reduce is None else ())
        kept = call.arg(keepdim, "keepdim", False) if dim is not None else False
        out = ["" if d in gone else n for d, n in enumerate(ins) if kept or d not in gone]
        outs = [None if o is None else out[: o.ndim] for o in call.outputs]
        left = {n.removesuffix("!"): reduce for n in ins}
        return factors([ins], outs, reduce=left, linear=linear_groups(call, [(0,)], passes))

    return rule


def truth(op: str, dim: int | None = 1) -> Rule:
    """A reduction to whether any or all are true: truths pending in the same extreme pass through, numbers do not."""
    numbers, truths = reduction(op, dim=dim), reduction(op, (op,), dim=dim)
    return lambda call: (truths if call.operands[0].dtype == torch.bool else numbers)(call)


def along(passes: tuple[str, ...] = (), dim: int = 1, default: Any = -1) -> Rule:
    """Works along one dim, which stays whole; all outputs have the operand's other dims."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        whole = normal_dims(call.arg(dim, "dim", default), ndim)
        ins = named(ndim, whole)
        outs = [None if o is None else [f"o{d}!" if d in whole else n for d, n in enumerate(ins)] for o in call.outputs]
        return factors([ins], outs, linear=linear_groups(call, [(0,)], passes), note="an element depends on all others along the dim")

    return rule


def histogram(call: Call) -> Factors:
    """Counts between two given bounds add up; without bounds, those of the whole tensor are needed."""
    bounded = call.arg(2, "min", 0) < call.arg(3, "max", 0)
    return factors([named(call.operands[0].ndim, () if bounded else range(call.operands[0].ndim))], [["bin!"]])


register(names("histc"), histogram)
# sum and its pending sums; extremes of extremes; products of products.
register(names("sum.dim_IntList"), reduction("sum", SUMS))
register(names("sum"), reduction("sum", SUMS, dim=None))
register(names("mean.dim"), reduction(None, SUMS))
register(names("mean"), reduction(None, SUMS, dim=None))
register(names("amax"), reduction("max", ("max",)))
register(names("amin"), reduction("min", ("min",)))
register(names("max"), reduction("max", ("max",), dim=None))
register(names("min"), reduction("min", ("min",), dim=None))
register(names("any.dim any.dims"), truth("max"))
register(names("any"), truth("max", dim=None))
register(names("all.dim all.dims"), truth("min"))
register(names("all"), truth("min", dim=None))
register(names("prod.dim_int"), reduction("product", ("product",)))
register(names("prod"), reduction("product", ("product",), dim=None))
# The reduced dims whole: the position, the mean or the norm of all of it is needed.
register(names("max.dim min.dim argmax argmin median.dim"), reduction(None))
register(names("mode"), reduction(None, default=-1))
register(names("kthvalue"), reduction(None, dim=2, keepdim=3, default=-1))
register(names("logsumexp"), reduction(None))
register(names("median"), reduction(None, dim=None))
register(names("var.correction std.correction var_mean.correction std_mean.correction"), reduction(None, keepdim=9))
register(names("var.dim var_mean.dim std.dim"), reduction(None, keepdim=3))
register(names("linalg_vector_norm norm.ScalarOpt_dim"), reduction(None, dim=2, keepdim=3))
# Along one dim.
register(names("cumsum"), along(SUMS))
register(names("cumprod logcumsumexp cummax cummin"), along())
register(names("sort argsort"), along())
register(names("sort.stable argsort.stable"), along(dim=2))
register(names("topk"), along(dim=2))
register(names("_fft_r2c _fft_c2c _fft_c2r"), along(SUMS))
