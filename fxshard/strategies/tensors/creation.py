"""Tensors made from literals: every dim can be sharded. Pending sums are not offered, since replication is as cheap."""

from __future__ import annotations

from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, factors, replicate_all
from fxshard.strategies.engine.local import LocalContext, LocalForm
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register, replaced, unchanged
from fxshard.strategies.tensors.dims import named, places
from fxshard.strategies.tensors.pointwise import aten_names

aten = torch.ops.aten


def create(call: Call) -> Factors:
    """Factors of the output only; operands (a fill value, or a tensor that gives dtype and device) stay whole."""
    return factors([[""] * o.ndim for o in call.operands], [None if o is None else named(o.ndim) for o in call.outputs])


def local_arange(ctx: LocalContext) -> Any:
    """start + step * (offset + i) for the shard's indices i; in float64 for floats, as in torch's kernel."""
    if not ctx.outputs[0].axes_on(0):
        return unchanged(ctx)
    (start, step), out = _start_step(ctx.call), ctx.call.output
    options = {k: v for k, v in ctx.kwargs.items() if k in ("device", "layout", "pin_memory")}
    index = ctx.emit(aten.arange.default, ctx.output_shape()[0], dtype=torch.int64, **options)
    index = ctx.emit(aten.add.Tensor, index, ctx.output_offset(0, 0))
    if out.dtype.is_floating_point:
        index = ctx.emit(aten._to_copy.default, index, dtype=torch.float64)
    if step != 1:
        index = ctx.emit(aten.mul.Tensor, index, step)
    if start != 0:
        index = ctx.emit(aten.add.Tensor, index, start)
    return ctx.emit(aten._to_copy.default, index, dtype=out.dtype)


def local_eye(ctx: LocalContext) -> Any:
    """Ones where the global row equals the global column."""
    if not any(ctx.outputs[0].axes_on(d) for d in (0, 1)):
        return unchanged(ctx)
    same = ctx.emit(aten.eq.Tensor, ctx.emit(aten.unsqueeze.default, places(ctx, 0), -1), places(ctx, 1))
    return ctx.emit(aten._to_copy.default, same, dtype=ctx.call.output.dtype)


def local_strided(position: int) -> LocalForm:
    """Local size and dense strides, with the same order of dims in memory; ``position``: argument position of the size."""

    def local(ctx: LocalContext) -> Any:
        size, strides = list(ctx.output_shape()), ctx.call.arg(position + 1)
        step, dense = 1, list(strides)
        for d in sorted(range(len(size)), key=lambda d: (strides[d], -d)):
            dense[d], step = step, step * torch.sym_max(size[d], 1)
        return ctx.emit(ctx.target, *replaced(ctx.args, {position: size, position + 1: dense}), **ctx.kwargs)

    return local


def _start_step(call: Call) -> tuple[Any, Any]:
    if call.op == "aten.arange.default":
        return 0, 1
    return call.arg(0), call.arg(2, "step", 1) if call.op == "aten.arange.start_step" else 1


register(aten_names("full zeros ones empty.memory_format"), create, size_argument=0)
register(aten_names("new_full new_zeros new_ones new_empty"), create, size_argument=1)
register(aten_names("zeros_like ones_like full_like empty_like"), pointwise_rule())
register(aten_names("scalar_tensor"), create)
register(aten_names("empty_strided"), create, local=local_strided(0))
register(aten_names("new_empty_strided"), create, local=local_strided(1))
register(aten_names("linspace logspace tril_indices triu_indices"), replicate_all)
register(aten_names("eye eye.m"), create, local=local_eye)
register("fxshard.constant.default", replicate_all)
register(aten_names("arange arange.start arange.start_step"), create, local=local_arange)
