"""Ring attention: queries, keys and values sharded along the sequence on one axis, whose ranks pass k and v around (Liu et al., 2023).

With n ranks there are n steps. In step i a rank attends to the block of the rank i before it, while the next block arrives; results are
merged by their logsumexp. The backward passes k and v again, and the sums of dk and dv after them: after its n - 1 shifts a sum is at home,
where the block's own share, computed first, is added. Causal attention skips blocks that a rank does not see. Ranks late in the sequence
see more of them, and set the pace: the sequence keeps its order.

Buffers have ceil sizes, so that ranks with short or empty shards pass them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.call import Call
from fxshard.layout.layouts import ceil_shape
from fxshard.mesh.mesh import Mesh
from fxshard.ops.attention import lse_dtype
from fxshard.plans.plan_data import NodeCollective, OpSpec
from fxshard.strategies.engine.local import LocalContext, emit_padding

aten = torch.ops.aten
ops = torch.ops.fxshard
SEQUENCE = 2
"""The dim of queries and keys in [batch, heads, sequence, head dim]."""


def ring_axis(spec: OpSpec | LocalContext, query: int) -> int | None:
    """The axis around which k and v are passed; None if each rank has all keys. ``query``: position of q among the operands."""
    axes = spec.inputs[query + 1].axes_on(SEQUENCE)
    return axes[0] if axes else None


def shifts(call: Call, spec: OpSpec, mesh: Mesh, query: int) -> tuple[NodeCollective, ...]:
    """The collectives of ring attention: k and v in one buffer, n - 1 times; in the backward dk and dv too, from the second step on."""
    axis = ring_axis(spec, query)
    if axis is None:
        return ()
    key = call.operands[query + 1]
    shape = (2, *ceil_shape(key.shape, spec.inputs[query + 1], mesh.shape))
    one = NodeCollective("shift", mesh.axis_names[axis], shape, key.dtype.itemsize, query + 1)
    return (one,) * ((mesh.shape[axis] - 1) * (2 if query else 1))


def ring_forward(ctx: LocalContext, axis: int) -> tuple[fx.Node, fx.Node]:
    """(out, logsumexp) of ``fxshard.sdpa``."""
    q, k, v, _, causal, scale, grouped = ctx.args
    ring = _Ring(ctx, axis, 0, causal)
    pair, out, lse = ring.packed(k, v), None, None
    for step in range(ring.ranks):
        started = ctx.shift(pair, axis) if step < ring.ranks - 1 else None
        keys = (k, v) if step == 0 else ring.halves(pair)
        part = ctx.emit(ops.block_attention.default, q, *keys, *ring.place(step), scale, grouped)
        some, some_lse = ctx.item(part, 0), ctx.item(part, 1)
        if out is not None:
            merged = ctx.emit(ops.merge_attention.default, out, lse, some, some_lse)
            some, some_lse = ctx.item(merged, 0), ctx.item(merged, 1)
        out, lse = some, some_lse
        pair = pair if started is None else ctx.arrived(started)
    assert out is not None and lse is not None
    return ring.converted(out, q), lse


def ring_backward(ctx: LocalContext, axis: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(dq, dk, dv) of ``fxshard.sdpa_backward``."""
    grad, q, k, v, out, lse, _, causal, scale, grouped = ctx.args
    ring = _Ring(ctx, axis, 1, causal)
    pair, dq, travelling = ring.packed(k, v), None, None
    own: tuple[fx.Node, ...] = ()
    for step in range(ring.ranks):
        started = ctx.shift(pair, axis) if step < ring.ranks - 1 else None
        keys = (k, v) if step == 0 else ring.halves(pair)
        place = ring.place(step)
        part = ctx.emit(ops.block_attention_backward.default, grad, q, *keys, out, lse, *place, scale, grouped)
        share, *shares = (ctx.item(part, i) for i in range(3))
        dq = ring.widened(share) if dq is None else ctx.emit(aten.add.Tensor, dq, share)
        if step == 0:
            own = tuple(shares)
        else:
            sums = ring.packed(*shares)
            if travelling is not None:
                sums = ctx.emit(aten.add.Tensor, ctx.arrived(travelling), sums)
            travelling = ctx.shift(sums, axis)
        pair = pair if started is None else ctx.arrived(started)
    assert dq is not None
    if travelling is not None:
        home = ring.halves(ctx.arrived(travelling), own)
        own = tuple(ctx.emit(aten.add.Tensor, mine, theirs) for mine, theirs in zip(own, home, strict=True))
    return ring.converted(dq, q), own[0], own[1]


class _Ring:
    """What the steps of a ring share. ``query``: position of q among the operands."""

    def __init__(self, ctx: LocalContext, axis: int, query: int, causal: bool) -> None:
        self.ctx, self.axis, self.query, self.causal = ctx, axis, query, causal
        self.ranks = ctx.mesh.shape[axis]
        self.keys = ctx.call.operands[query + 1]
        self.ceil = ceil_shape(self.keys.shape, ctx.inputs[query + 1], ctx.mesh.shape)
        self.even = surely(self.keys.shape[SEQUENCE] % self.ranks == 0)

    def packed(self, k: fx.Node, v: fx.Node) -> fx.Node:
        """[2, *ceil shape of k]: both in one buffer, with zeros where this rank's are shorter."""
        return self.ctx.emit(aten.stack.default, [self._padded(t) for t in (k, v)])

    def _padded(self, x: fx.Node) -> fx.Node:
        missing = [want - have for want, have in zip(self.ceil, x.meta["val"].shape, strict=True)]
        if all(surely(m == 0) for m in missing):
            return x
        return emit_padding(self.ctx.emit, x, [n for m in reversed(missing) for n in (0, m)], 0)

    def halves(self, pair: fx.Node, like: Sequence[fx.Node] = ()) -> tuple[fx.Node, ...]:
        """The two tensors of a buffer, cut to this rank's batch and heads, or to the shapes of ``like``."""
        whole = [self.ctx.emit(aten.select.int, pair, 0, half) for half in (0, 1)]
        own = self.ctx.input_shape(self.query + 1)
        shapes = [tuple(x.meta["val"].shape) for x in like] or [(*own[:SEQUENCE], *self.ceil[SEQUENCE:])] * 2
        return tuple(self._cut(x, shape) for x, shape in zip(whole, shapes, strict=True))

    def _cut(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        for dim, (want, have) in enumerate(zip(shape, x.meta["val"].shape, strict=True)):
            if not surely(want == have):
                x = self.ctx.emit(aten.index_select.default, x, dim, self.ctx.emit(aten.arange.default, want, dtype=torch.int64))
        return x

    def place(self, step: int) -> tuple[Any, Any]:
        """(first query's position less the first key's, None if not causal; number of keys before padding, None if all) in a step."""
        ctx, total, most = self.ctx, self.keys.shape[SEQUENCE], self.ceil[SEQUENCE]
        if not self.causal and (self.even or step == 0):
            return None, None
        owner = ctx.axis_index(self.axis)
        if step:
            owner = ctx.emit(aten.remainder.Scalar, ctx.emit(aten.sub.Tensor, owner, step), self.ranks)
        start = ctx.emit(aten.clamp_max.default, ctx.emit(aten.mul.Tensor, owner, most), total)
        offset = ctx.emit(aten.sub.Tensor, ctx.input_offset(self.query, SEQUENCE), start) if self.causal else None
        if self.even or step == 0:
            return offset, None
        left = ctx.emit(aten.add.Tensor, ctx.emit(aten.neg.default, start), total)
        return offset, ctx.emit(aten.clamp_max.default, left, most)

    def widened(self, x: fx.Node) -> fx.Node:
        """``x`` in the dtype in which results of blocks are added up."""
        return self._as(x, lse_dtype(x.meta["val"]))

    def converted(self, x: fx.Node, like: fx.Node) -> fx.Node:
        """A sum in the dtype of ``like``."""
        return self._as(x, like.meta["val"].dtype)

    def _as(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self.ctx.emit(aten._to_copy.default, x, dtype=dtype)
