"""Grouped matmuls, one matrix per group of rows (mixture of experts): rows offs[e - 1] to offs[e] belong to group e.

out[s, n] = sum_k x[s, k] w[e(s), k, n]. The rows stay whole, because the boundaries of groups depend on data. With sharded groups, a
rank moves the rows of its own groups to the front, computes them, and gives zeros for all others: a pending sum.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, on_contiguous
from fxshard.strategies.engine.registry import register, replaced

aten = torch.ops.aten
ALIGNMENT = 16
"""Alignment of rows, in bytes, that torch's kernel requires; dims are sharded in blocks of this size."""


def forward(call: Call) -> Factors:
    """(x [s k], w [e k n], offs [e]) -> [s n]."""
    operands = [["s!", "k"], ["e", "k", "n"], ["offs!"]]
    return factors(operands, [["s!", "n"]], linear=linear_groups(call, [(0,), (1,)]))


def backward(call: Call) -> Factors:
    """(x [s k], w [e k n], offs, grad [s n]) -> dx [s k], a sum over n and e; dw [e k n]."""
    operands = [["s!", "k"], ["e", "k", "n"], ["offs!"], ["s!", "n"]]
    outputs = [["s!", "k"], ["e", "k", "n"]]
    return factors(operands, outputs, linear=linear_groups(call, [(3,)]), depends=((1, 2, 3), (0, 2, 3)))


def grouped(call: Call) -> Factors:
    """``aten._grouped_mm``, by the ndims of (a, b). (2, 3): groups of rows of a; (3, 2): of columns of b; (2, 2): of the summed dim;
    (3, 3): a batch of matrices."""
    a, b = call.operands[:2]
    block = ALIGNMENT // a.dtype.itemsize

    def dim(name: str, size: Any) -> Name:
        return (name, f"{name}_block!") if known_equal(size % block, 0) else f"{name}!"

    m, k, n = dim("m", a.shape[-2]), dim("k", a.shape[-1]), dim("n", b.shape[-1])
    ins, out = {
        (2, 3): ([["s!", k], ["e", k, n]], ["s!", n]),
        (3, 2): ([["e!", m, k], [k, "s!"]], [m, "s!"]),
        (2, 2): ([[m, "s!"], ["s!", n]], ["e", m, n]),
        (3, 3): ([["e", m, k], ["e", k, n]], ["e", m, n]),
    }[a.ndim, b.ndim]
    offs = [["offs!"]] if isinstance(call.arg(2, "offs"), Operand) else []
    sizes = {f"{name}_block": block for name in "mkn"}
    return factors([*ins, *offs], [out], sizes=sizes, linear=linear_groups(call, [(0,), (1,)]))


def local_forward(ctx: LocalContext) -> Any:
    if not ctx.inputs[1].axes_on(0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    x, w, offs = ctx.args[:3]
    place = _OwnRows(ctx, offs, ctx.input_offset(1, 0), ctx.input_shape(1)[0], ctx.input_shape(0)[0])
    out = ctx.emit(ctx.target, place.to_front(x), w, place.offs, *ctx.args[3:], **ctx.kwargs)
    return place.back(out)


def local_backward(ctx: LocalContext) -> Any:
    if not ctx.inputs[1].axes_on(0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    x, w, offs, grad = ctx.args
    place = _OwnRows(ctx, offs, ctx.input_offset(1, 0), ctx.input_shape(1)[0], ctx.input_shape(0)[0])
    both = ctx.emit(ctx.target, place.to_front(x), w, place.offs, place.to_front(grad))
    dx, dw = (ctx.emit(operator.getitem, both, i) for i in range(2))
    return place.back(dx), dw


def local_grouped(ctx: LocalContext) -> Any:
    """Groups are sharded in the weights (2, 3) or in their gradient (2, 2); a batch of matrices (3, 3) has no offsets."""
    forms = tuple(o.ndim for o in ctx.call.operands[:2])
    if forms == (2, 3):
        return local_forward(ctx)
    if forms != (2, 2) or not ctx.outputs[0].axes_on(0):
        return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)
    a, b, offs = ctx.args[:3]
    place = _OwnRows(ctx, offs, ctx.output_offset(0, 0), ctx.output_shape()[0], ctx.input_shape(1)[0])
    front = place.to_front(a, 1, by_rows=ctx.input_shape(0)[0] * ctx.call.operands[0].dtype.itemsize % ALIGNMENT != 0)
    return ctx.emit(ctx.target, *replaced(ctx.args, {0: front, 1: place.to_front(b), 2: place.offs}), **ctx.kwargs)


def aligned(t: torch.Tensor) -> bool:
    """Whether torch's kernel accepts the strides of a matrix: row-major or column-major, each row or column at a multiple of 16 bytes."""
    if t.ndim < 2:
        return t.is_contiguous()
    steps = sorted(t.stride()[-2:])
    return steps[0] == 1 and all(s * t.element_size() % ALIGNMENT == 0 for s in (*t.stride()[:-2], steps[1]))


class _OwnRows:
    """The position of a rank's own groups, ``count`` of them from ``first`` on, among ``rows`` rows."""

    def __init__(self, ctx: LocalContext, offs: Any, first: Any, count: int, rows: int) -> None:
        self.ctx, self.rows = ctx, rows
        ends = ctx.emit(aten.constant_pad_nd.default, offs, [1, 0])
        own = ctx.emit(aten.add.Tensor, self._arange(count + 1), first)
        ends = ctx.emit(aten.index_select.default, ends, 0, own)
        self.start = ctx.emit(aten.slice.Tensor, ends, 0, 0, 1)
        self.offs = ctx.emit(aten.sub.Tensor, ctx.emit(aten.slice.Tensor, ends, 0, 1, count + 1), self.start)
        self.length = ctx.emit(aten.slice.Tensor, self.offs, 0, count - 1, count)

    def to_front(self, x: Any, dim: int = 0, by_rows: bool = True) -> Any:
        """Rotates the rows (or, with ``dim`` 1, columns) so that the rank's own come first. Unless ``by_rows``, columns are rotated as rows
        of the transpose."""
        moved = self.ctx.emit(aten.add.Tensor, self._arange(self.rows), self.start)
        index = self.ctx.emit(aten.remainder.Scalar, moved, self.rows)
        if dim == 0 or by_rows:
            return self.ctx.emit(aten.index_select.default, x, dim, index)
        turned = self.ctx.emit(aten.transpose.int, x, 0, 1)
        return self.ctx.emit(aten.transpose.int, self.ctx.emit(aten.index_select.default, turned, 0, index), 0, 1)

    def back(self, out: Any) -> Any:
        """Undoes the rotation and zeroes the rows of other groups, which the kernel may leave undefined."""
        place = self.ctx.emit(aten.sub.Tensor, self._arange(self.rows), self.start)
        place = self.ctx.emit(aten.remainder.Scalar, place, self.rows)
        other = self.ctx.emit(aten.unsqueeze.default, self.ctx.emit(aten.ge.Tensor, place, self.length), -1)
        return self.ctx.emit(aten.masked_fill.Scalar, self.ctx.emit(aten.index_select.default, out, 0, place), other, 0)

    def _arange(self, count: int) -> Any:
        return self.ctx.emit(aten.arange.default, count, dtype=torch.int64)


register("transformers.grouped_mm_fallback.default", forward, local=local_forward)
register("transformers.grouped_mm_fallback_backward.default", backward, local=local_backward)
register("aten._grouped_mm.default", grouped, local=on_contiguous(local_grouped, aligned))
