"""Head-to-tail balance of causal ring attention: of 2 n blocks of the sequence, rank r attends for blocks r and 2n - 1 - r.

Every rank then sees as many keys in every step. The layout of the sequence stays: each rank holds blocks 2r and 2r + 1 before and after,
and ``zigzag`` moves them, two halves of a buffer [2, ...], to the ranks where they are used, or back. Halves are sent in the order of the
ranks that get them, and arrive in the order of those that send them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import is_symbolic
from fxshard.graph.call import Call
from fxshard.strategies.engine.local import LocalContext

aten = torch.ops.aten


def is_balanced(call: Call, query: int, causal: bool, ranks: int) -> bool:
    """Whether 2 n blocks of equal length make up queries and keys; otherwise late ranks work longer. Dynamic sizes may be of any length."""
    if call.any_size or any(is_symbolic(size) for meta in call.operands for size in meta.shape):
        return False
    length, keys = (call.operands[i].shape[2] for i in (query, query + 1))
    return causal and ranks > 1 and length == keys and length % (2 * ranks) == 0


def halves_shape(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The shape of the buffer of ``shape``, with two halves of ``dim``."""
    return (2, *shape[:dim], shape[dim] // 2, *shape[dim + 1 :])


def spread(ctx: LocalContext, x: fx.Node, dim: int, axis: int) -> fx.Node:
    """Starts to send a rank's blocks 2r and 2r + 1 of ``dim`` to the ranks that use them."""
    return ctx.zigzag(_reordered(ctx, _split(ctx, x, dim), axis), False, axis)


def received(ctx: LocalContext, started: fx.Node, dim: int) -> fx.Node:
    """What ``spread`` gives: blocks r and 2n - 1 - r, side by side in ``dim``."""
    return _joined(ctx, ctx.arrived(started), dim)


def give_back(ctx: LocalContext, x: fx.Node, dim: int, axis: int) -> fx.Node:
    """Starts to send blocks r and 2n - 1 - r of ``dim`` to the ranks that hold them."""
    return ctx.zigzag(_split(ctx, x, dim), True, axis)


def restored(ctx: LocalContext, started: fx.Node, dim: int, axis: int) -> fx.Node:
    """What ``give_back`` gives: blocks 2r and 2r + 1, side by side in ``dim``."""
    return _joined(ctx, _reordered(ctx, ctx.arrived(started), axis), dim)


def _split(ctx: LocalContext, x: fx.Node, dim: int) -> fx.Node:
    shape = list(x.meta["val"].shape)
    pieces = ctx.emit(aten.view.default, _dense(ctx, x), [*shape[:dim], 2, shape[dim] // 2, *shape[dim + 1 :]])
    return _dense(ctx, ctx.emit(aten.permute.default, pieces, [dim, *range(dim), *range(dim + 1, len(shape) + 1)]))


def _joined(ctx: LocalContext, halves: fx.Node, dim: int) -> fx.Node:
    _, *shape = halves.meta["val"].shape
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
    side_by_side = _dense(ctx, ctx.emit(aten.permute.default, halves, order))
    return ctx.emit(aten.view.default, side_by_side, [*shape[:dim], 2 * shape[dim], *shape[dim + 1 :]])


def _dense(ctx: LocalContext, x: fx.Node) -> fx.Node:
    return ctx.emit(aten.clone.default, x, memory_format=torch.contiguous_format)


def _reordered(ctx: LocalContext, halves: fx.Node, axis: int) -> fx.Node:
    """The halves in the other order on ranks in the second half of the axis, whose blocks go to ranks in descending order."""
    late = ctx.emit(aten.ge.Scalar, ctx.emit(aten.mul.Tensor, ctx.axis_index(axis), 2), ctx.mesh.shape[axis])
    numbers = ctx.emit(aten.arange.default, 2, dtype=torch.int64)
    order = ctx.emit(aten.remainder.Scalar, ctx.emit(aten.add.Tensor, numbers, late), 2)
    return ctx.emit(aten.index_select.default, halves, 0, order)
