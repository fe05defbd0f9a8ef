"""Operators that reorder, add or drop whole dims: permute, transpose, unsqueeze, squeeze, expand, repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, Name, factors, is_one, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, on_contiguous
from fxshard.strategies.engine.registry import register, unchanged

aten = torch.ops.aten


def named(ndim: int, whole: Iterable[int] = (), prefix: str = "d") -> list[str]:
    """Names ``d0 d1 ...``; dims in ``whole`` are marked to stay whole (``d0!``)."""
    kept = set(whole)
    return [f"{prefix}{i}!" if i in kept else f"{prefix}{i}" for i in range(ndim)]


def rearranged(call: Call, ins: Iterable[Name], outs: Iterable[Name], **properties: Any) -> Factors:
    """Factors of an operator that rearranges operand 0, so that all reductions pass."""
    return factors([list(ins)], [list(outs)], linear=linear_groups(call, [(0,)], MOVEMENT), **properties)


def kept(call: Call, whole: Iterable[int] = ()) -> Factors:
    """Factors of an operator that keeps the dims of operand 0; those in ``whole`` stay whole."""
    names = named(call.operands[0].ndim, whole)
    return rearranged(call, names, names)


def normalised_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Non-negative dims from an argument: one dim, several, or None or () for all."""
    if dims is None or dims == ():
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in (dims if isinstance(dims, tuple) else (dims,)))


def permute(call: Call) -> Factors:
    """out[i_p0, i_p1, ...] = x[i_0, i_1, ...]."""
    ins = named(call.operands[0].ndim)
    return rearranged(call, ins, [ins[d] for d in normalised_dims(call.arg(1), len(ins))] if ins else [])


def transpose(call: Call) -> Factors:
    """Swaps two dims; ``t`` swaps the first two."""
    ins = named(call.operands[0].ndim)
    if len(ins) < 2:
        return rearranged(call, ins, ins)
    a, b = call.arg(1, default=0) % len(ins), call.arg(2, default=1) % len(ins)
    outs = list(ins)
    outs[a], outs[b] = ins[b], ins[a]
    return rearranged(call, ins, outs)


def unsqueeze(call: Call) -> Factors:
    """Adds a dim of size 1."""
    ins = named(call.operands[0].ndim)
    dim = call.arg(1) % (len(ins) + 1)
    return rearranged(call, ins, [*ins[:dim], "", *ins[dim:]])


def dropped_dims(call: Call) -> list[int]:
    """The dims that a squeeze drops: requested ones whose global size is 1."""
    shape = call.operands[0].shape
    if call.op == "aten.squeeze.dims" and not call.arg(1, "dim"):
        return []
    asked = normalised_dims(call.arg(1, "dim"), len(shape)) if call.op != "aten.squeeze.default" else range(len(shape))
    return [d for d in asked if shape and is_one(shape[d])]


def squeeze(call: Call) -> Factors:
    """Drops dims of size 1."""
    ins = named(call.operands[0].ndim)
    gone = dropped_dims(call)
    return rearranged(call, ins, [n for d, n in enumerate(ins) if d not in gone])


def local_squeeze(ctx: LocalContext) -> Any:
    """Drops the dims that the global operator drops: others may also have a local size of 1."""
    return ctx.emit(aten.squeeze.dims, ctx.args[0], dropped_dims(ctx.call))


def expand(call: Call) -> Factors:
    """Repeats dims of size 1 and adds new ones: their factors are in the output only."""
    outs, shape = named(call.output.ndim), call.operands[0].shape
    lead = len(outs) - len(shape)
    ins = ["" if is_one(size) else outs[lead + d] for d, size in enumerate(shape)]
    return rearranged(call, ins, outs)


def repeat(call: Call) -> Factors:
    """out dim = (r d): r consecutive copies of the whole dim."""
    shape, out = call.operands[0].shape, call.output
    lead = out.ndim - len(shape)
    outs: list[Name] = [f"d{i}" for i in range(out.ndim)]
    sizes: dict[str, Any] = {}
    for d, size in enumerate(shape):
        if not known_equal(out.shape[lead + d], size):
            outs[lead + d] = (f"r{d}", f"d{lead + d}")
            sizes |= {f"r{d}": call.arg(1)[lead + d], f"d{lead + d}": size}
    return rearranged(call, [f"d{lead + d}" for d in range(len(shape))], outs, sizes=sizes)


def local_repeat(ctx: LocalContext) -> Any:
    """The number of copies that gives the local shape."""
    local, out = ctx.input_shape(0), ctx.output_shape()
    lead = len(out) - len(local)
    times = [o // i if i else n for o, i, n in zip(out[lead:], local, ctx.call.arg(1)[lead:], strict=True)]
    return ctx.emit(ctx.target, ctx.args[0], [*out[:lead], *times])


def repeat_interleave(call: Call) -> Factors:
    """out dim = (d r): each element is repeated r times."""
    ins = named(call.operands[0].ndim)
    if call.arg(2, "dim") is None:
        return rearranged(call, [f"{n}!" for n in ins], ["out!"])
    dim = call.arg(2, "dim") % len(ins)
    outs: list[Name] = list(ins)
    outs[dim] = (ins[dim], "r")
    return rearranged(call, ins, outs, sizes={"r": call.arg(1)})


def local_interleave(ctx: LocalContext) -> Any:
    kwargs = {k: v for k, v in ctx.kwargs.items() if k != "output_size"}
    return ctx.emit(ctx.target, *ctx.args[:3], **kwargs)


def complex_parts(call: Call) -> Factors:
    """``view_as_real`` and its inverse: a last dim of real and imaginary parts."""
    ins, outs = named(call.operands[0].ndim), named(call.output.ndim)
    if len(ins) < len(outs):
        outs[-1] = "ri!"
    else:
        ins[-1] = "ri!"
    return factors([ins], [outs], linear=linear_groups(call, [(0,)]))


def local_parts(ctx: LocalContext) -> Any:
    """Resolves a lazy conjugate, whose parts are not in memory yet."""
    return ctx.emit(ctx.target, ctx.emit(aten.resolve_conj.default, ctx.args[0]))


def flip(call: Call) -> Factors:
    """Reverses some dims, which stay whole: the first shard would become the last."""
    ndim = call.operands[0].ndim
    return kept(call, normalised_dims(call.arg(1), ndim) if call.arg(1) else ())


def roll(call: Call) -> Factors:
    """Shifted dims stay whole, because shards would need elements of their neighbours; without an argument, all dims are shifted."""
    return kept(call, normalised_dims(call.arg(2, default=()), call.operands[0].ndim))


def rot90(call: Call) -> Factors:
    """Rotates two dims by quarter turns, a combination of flips and transposition: they stay whole."""
    ndim = call.operands[0].ndim
    dims = normalised_dims(call.arg(2, default=(0, 1)), ndim)
    return rearranged(call, named(ndim, dims), named(ndim, dims, "d") if call.arg(1, default=1) % 2 == 0 else _turned(ndim, dims))


def _turned(ndim: int, dims: tuple[int, ...]) -> list[str]:
    names = named(ndim, dims)
    names[dims[0]], names[dims[1]] = names[dims[1]], names[dims[0]]
    return names


def channel_shuffle(call: Call) -> Factors:
    """Channels (g c) become (c g): no factor is outermost on both sides, so they stay whole."""
    return kept(call, (1,))


def triangle(call: Call) -> Factors:
    """Zeros above or below the diagonal of the last two dims; all reductions map zeros to zero."""
    return kept(call)


def local_triangle(ctx: LocalContext) -> Any:
    """Masks by global row and column, so that the diagonal is that of the global tensor."""
    ndim = ctx.call.operands[0].ndim
    if not any(ctx.inputs[0].axes_on(d) for d in (ndim - 2, ndim - 1)):
        return unchanged(ctx)
    row, column = (places(ctx, d) for d in (ndim - 2, ndim - 1))
    right = ctx.emit(aten.sub.Tensor, column, ctx.emit(aten.unsqueeze.default, row, -1))
    beyond = aten.gt.Scalar if ctx.call.op == "aten.tril.default" else aten.lt.Scalar
    return ctx.emit(aten.masked_fill.Scalar, ctx.args[0], ctx.emit(beyond, right, ctx.call.arg(1, "diagonal", 0)), 0)


def places(ctx: LocalContext, dim: int) -> Any:
    """Global indices of output 0's shard along ``dim``."""
    inside = ctx.emit(aten.arange.default, ctx.output_shape()[dim], dtype=torch.int64)
    return ctx.emit(aten.add.Tensor, inside, ctx.output_offset(0, dim))


register(["aten.permute.default", "aten.permute_copy.default"], permute)
register(["aten.transpose.int", "aten.t.default", "aten.transpose_copy.int", "aten.t_copy.default"], transpose)
register(["aten.unsqueeze.default", "aten.unsqueeze_copy.default"], unsqueeze)
register(["aten.squeeze_copy.default", "aten.squeeze_copy.dim", "aten.squeeze_copy.dims"], squeeze, local=local_squeeze)
register(["aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"], squeeze, local=local_squeeze)
register(["aten.expand.default", "aten.expand_copy.default"], expand, size_argument=1)
register("aten.repeat.default", repeat, local=local_repeat)
register("aten.repeat_interleave.self_int", repeat_interleave, local=local_interleave)
register("aten.view_as_real.default", complex_parts, local=local_parts)
register("aten.view_as_complex.default", complex_parts, local=on_contiguous(unchanged))
register("aten.flip.default", flip)
register("aten.roll.default", roll)
register(["aten.tril.default", "aten.triu.default"], triangle, local=local_triangle)
register("aten.rot90.default", rot90)
register("aten.channel_shuffle.default", channel_shuffle)
