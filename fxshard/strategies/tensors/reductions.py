"""Reductions over some dims; a reduced dim can be sharded if the reduction can be left pending."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import SUMS, Factors, Rule, factors, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.tensors.dims import named, normalised_dims
from fxshard.strategies.tensors.pointwise import aten_names


def reduction(reduce: str | None, passes: tuple[str, ...] = (), dim: int | None = 1, keepdim: int = 2, default: Any = None) -> Rule:
    """A reduction over the dims in argument ``dim`` (``default`` if omitted; None: all dims).

    ``reduce``: the reduction that a sharded dim leaves pending, None if it must stay whole; ``passes``: pending reductions that pass
    through; ``keepdim``: position of that argument.
    """

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        gone = set(normalised_dims(None if dim is None else call.arg(dim, "dim", default), ndim))
        ins = named(ndim, gone if reduce is None else ())
        kept = call.arg(keepdim, "keepdim", False) if dim is not None else False
        out = ["" if d in gone else n for d, n in enumerate(ins) if kept or d not in gone]
        outs = [None if o is None else out[: o.ndim] for o in call.outputs]
        left = {n.removesuffix("!"): reduce for n in ins}
        return factors([ins], outs, reduce=left, linear=linear_groups(call, [(0,)], passes))

    return rule


def truth(op: str, dim: int | None = 1) -> Rule:
    """any and all: pending maxima or minima pass through for booleans, but not for numbers."""
    numbers, truths = reduction(op, dim=dim), reduction(op, (op,), dim=dim)
    return lambda call: (truths if call.operands[0].dtype == torch.bool else numbers)(call)


def along(passes: tuple[str, ...] = (), dim: int = 1, default: Any = -1, filled: bool = False) -> Rule:
    """An operator along one dim, which stays whole; all outputs have the operand's other dims. ``filled``: as in ``Factors``."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        whole = normalised_dims(call.arg(dim, "dim", default), ndim)
        ins = named(ndim, whole)
        outs = [None if o is None else [f"o{d}!" if d in whole else n for d, n in enumerate(ins)] for o in call.outputs]
        note = "an element depends on all others along the dim"
        return factors([ins], outs, linear=linear_groups(call, [(0,)], passes), filled=filled, note=note)

    return rule


def histogram(call: Call) -> Factors:
    """With given bounds, counts of shards add up; else the bounds of the whole tensor are needed."""
    bounded = call.arg(2, "min", 0) < call.arg(3, "max", 0)
    return factors([named(call.operands[0].ndim, () if bounded else range(call.operands[0].ndim))], [["bin!"]])


register(aten_names("histc"), histogram)
# Sums of pending sums, maxima of maxima, minima of minima, products of products.
register(aten_names("sum.dim_IntList"), reduction("sum", SUMS))
register(aten_names("sum"), reduction("sum", SUMS, dim=None))
register(aten_names("mean.dim"), reduction(None, SUMS))
register(aten_names("mean"), reduction(None, SUMS, dim=None))
register(aten_names("amax"), reduction("max", ("max",)))
register(aten_names("amin"), reduction("min", ("min",)))
register(aten_names("max"), reduction("max", ("max",), dim=None))
register(aten_names("min"), reduction("min", ("min",), dim=None))
register(aten_names("any.dim any.dims"), truth("max"))
register(aten_names("any"), truth("max", dim=None))
register(aten_names("all.dim all.dims"), truth("min"))
register(aten_names("all"), truth("min", dim=None))
register(aten_names("prod.dim_int"), reduction("product", ("product",)))
register(aten_names("prod"), reduction("product", ("product",), dim=None))
# Reduced dims stay whole: positions, means and norms need all of them.
register(aten_names("max.dim min.dim argmax argmin median.dim"), reduction(None))
register(aten_names("mode"), reduction(None, default=-1))
register(aten_names("kthvalue"), reduction(None, dim=2, keepdim=3, default=-1))
register(aten_names("logsumexp"), reduction(None))
register(aten_names("median"), reduction(None, dim=None))
register(aten_names("var.correction std.correction var_mean.correction std_mean.correction"), reduction(None, keepdim=9))
register(aten_names("var.dim var_mean.dim std.dim"), reduction(None, keepdim=3))
register(aten_names("linalg_vector_norm norm.ScalarOpt_dim"), reduction(None, dim=2, keepdim=3))
# Along one dim.
register(aten_names("cumsum"), along(SUMS))
register(aten_names("cumprod logcumsumexp cummax cummin"), along())
register(aten_names("sort argsort"), along())
register(aten_names("sort.stable argsort.stable"), along(dim=2))
register(aten_names("topk"), along(dim=2))
register(aten_names("_fft_r2c _fft_c2c _fft_c2r"), along(SUMS, filled=True))  # MKL takes no empty batch
