"""Ring attention: queries, keys and values sharded along the sequence on one axis, whose ranks pass k and v around (Liu et al., 2023).

With n ranks there are n steps. In step i a rank attends to the keys of the rank i before it, while the next ones arrive; results are merged
by their logsumexp. The backward passes k and v again, and the sums of dk and dv after them: after its n - 1 shifts a sum is at home, where
the rank's own share, computed first, is added. Causal attention skips keys that a rank does not see; if the lengths allow it, blocks are
first dealt head-to-tail (``zigzag``), so that all ranks see as many. Otherwise the last rank sets the pace.

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
from fxshard.ops.sdpa.attention import lse_dtype
from fxshard.plans.plan_data import NodeCollective, OpSpec
from fxshard.strategies.engine.local import LocalContext, emit_padding
from fxshard.strategies.linear import zigzag

aten = torch.ops.aten
ops = torch.ops.fxshard
SEQUENCE = 2
"""The dim of queries and keys in [batch, heads, sequence, head dim]."""
PACKED = 3
"""The same in a buffer of several such tensors."""


def ring_axis(spec: OpSpec | LocalContext, query: int) -> int | None:
    """The axis around which k and v are passed; None if each rank has all keys. ``query``: position of q among the operands."""
    axes = spec.inputs[query + 1].axes_on(SEQUENCE)
    return axes[0] if axes else None


def collectives(call: Call, spec: OpSpec, mesh: Mesh, query: int) -> tuple[NodeCollective, ...]:
    """The collectives of ring attention: k and v in one buffer, n - 1 times; in the backward dk and dv too, from the second step on.

    If blocks are dealt head-to-tail: before these k and v, then q (with its gradient and out in the backward, then logsumexp); after these
    out and logsumexp, or dq, then dk and dv.
    """
    axis = ring_axis(spec, query)
    if axis is None:
        return ()
    ranks, name = mesh.shape[axis], mesh.axis_names[axis]
    q, k = (ceil_shape(call.operands[i].shape, spec.inputs[i], mesh.shape) for i in (query, query + 1))
    size = call.operands[query].dtype.itemsize
    around = NodeCollective("shift", name, (2, *k), size, query + 1)
    shifts = (around,) * ((ranks - 1) * (2 if query else 1))
    if not zigzag.is_balanced(call, query, call.arg(7 if query else 4) is True, ranks):
        return shifts

    def dealt(shape: tuple[int, ...], dim: int, itemsize: int) -> NodeCollective:
        return NodeCollective("zigzag", name, zigzag.halves_shape(shape, dim), itemsize, query)

    pair, lse = dealt((2, *k), PACKED, size), dealt(q[:-1], SEQUENCE, 8 if size == 8 else 4)
    if query:
        return (pair, dealt((3, *q), PACKED, size), lse, *shifts, dealt(q, SEQUENCE, size), pair)
    return (pair, dealt(q, SEQUENCE, size), *shifts, dealt(q, SEQUENCE, size), lse)


def ring_forward(ctx: LocalContext, axis: int) -> tuple[fx.Node, fx.Node]:
    """(out, logsumexp) of ``fxshard.sdpa``."""
    q, k, v, _, causal, scale, grouped = ctx.args
    ring = _Ring(ctx, axis, 0, causal)
    pair, keys, queries = ring.packed(k, v), (k, v), q
    if ring.balanced:
        pair, queries = ring.dealt((pair, PACKED), (ring.padded(q), SEQUENCE))
        keys = ring.halves(pair)
    out, lse = None, None
    for step in range(ring.ranks):
        started = ctx.shift(pair, axis) if step < ring.ranks - 1 else None
        part = ctx.emit(ops.block_attention.default, queries, *keys, *ring.place(step), scale, grouped)
        some, some_lse = ctx.item(part, 0), ctx.item(part, 1)
        if out is not None:
            merged = ctx.emit(ops.merge_attention.default, out, lse, some, some_lse)
            some, some_lse = ctx.item(merged, 0), ctx.item(merged, 1)
        out, lse = some, some_lse
        if started is not None:
            pair = ctx.arrived(started)
            keys = ring.halves(pair)
    assert out is not None and lse is not None
    out = ring.converted(out, q)
    if ring.balanced:
        out, lse = ring.given_back((out, SEQUENCE), (lse, SEQUENCE))
        return ring.cut(out, ctx.output_shape(0)), ring.cut(lse, ctx.output_shape(1))
    return out, lse


def ring_backward(ctx: LocalContext, axis: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """(dq, dk, dv) of ``fxshard.sdpa_backward``."""
    grad, q, k, v, out, lse, _, causal, scale, grouped = ctx.args
    ring = _Ring(ctx, axis, 1, causal)
    pair, keys, dtype = ring.packed(k, v), (k, v), q.meta["val"].dtype
    if ring.balanced:
        rows = ctx.emit(aten.stack.default, [ring.padded(t) for t in (grad, q, out)])
        pair, rows, lse = ring.dealt((pair, PACKED), (rows, PACKED), (ring.padded(lse), SEQUENCE))
        keys = ring.halves(pair)
        grad, q, out = (ctx.emit(aten.select.int, rows, 0, i) for i in range(3))
    dq, own, travelling = None, None, None
    for step in range(ring.ranks):
        started = ctx.shift(pair, axis) if step < ring.ranks - 1 else None
        part = ctx.emit(ops.block_attention_backward.default, grad, q, *keys, out, lse, *ring.place(step), scale, grouped)
        share, *shares = (ctx.item(part, i) for i in range(3))
        dq = ring.widened(share) if dq is None else ctx.emit(aten.add.Tensor, dq, share)
        sums = ring.packed(*shares)
        if step == 0:
            own = sums
        else:
            sums = sums if travelling is None else ctx.emit(aten.add.Tensor, ctx.arrived(travelling), sums)
            travelling = ctx.shift(sums, axis)
        if started is not None:
            pair = ctx.arrived(started)
            keys = ring.halves(pair)
    assert dq is not None and own is not None
    if travelling is not None:
        own = ctx.emit(aten.add.Tensor, own, ctx.arrived(travelling))
    dq = dq if dq.meta["val"].dtype == dtype else ctx.emit(aten._to_copy.default, dq, dtype=dtype)
    if ring.balanced:
        dq, own = ring.given_back((dq, SEQUENCE), (own, PACKED))
    dk, dv = (ring.cut(ctx.emit(aten.select.int, own, 0, half), ctx.output_shape(1)) for half in (0, 1))
    return ring.cut(dq, ctx.output_shape(0)), dk, dv


class _Ring:
    """What the steps of a ring share. ``query``: position of q among the operands."""

    def __init__(self, ctx: LocalContext, axis: int, query: int, causal: bool) -> None:
        self.ctx, self.axis, self.query, self.causal = ctx, axis, query, causal
        self.ranks = ctx.mesh.shape[axis]
        self.keys = ctx.call.operands[query + 1]
        self.ceil = ceil_shape(self.keys.shape, ctx.inputs[query + 1], ctx.mesh.shape)
        self.even = surely(self.keys.shape[SEQUENCE] % self.ranks == 0)
        self.balanced = zigzag.is_balanced(ctx.call, query, causal, self.ranks)

    def packed(self, k: fx.Node, v: fx.Node) -> fx.Node:
        """[2, *ceil shape of k]: both in one buffer, with zeros where this rank's are shorter."""
        return self.ctx.emit(aten.stack.default, [self._to(t, self.ceil) for t in (k, v)])

    def padded(self, x: fx.Node) -> fx.Node:
        """A tensor with q's batch, heads and sequence, of ceil size, so that all ranks exchange equal buffers."""
        most = ceil_shape(self.ctx.call.operands[self.query].shape, self.ctx.inputs[self.query], self.ctx.mesh.shape)
        return self._to(x, most[: x.meta["val"].dim()])

    def _to(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        missing = [want - have for want, have in zip(shape, x.meta["val"].shape, strict=True)]
        if all(surely(m == 0) for m in missing):
            return x
        if not any(surely(m > 0) for m in missing):  # torch's kernel keeps the strides of x if nothing is missing
            x = self.ctx.emit(aten.clone.default, x, memory_format=torch.contiguous_format)
        return emit_padding(self.ctx.emit, x, [n for m in reversed(missing) for n in (0, m)], 0)

    def halves(self, pair: fx.Node) -> tuple[fx.Node, fx.Node]:
        """k and v of a buffer, with this rank's batch and heads; if blocks are dealt head-to-tail, all tensors have ceil sizes."""
        own = self.ctx.input_shape(self.query + 1)
        shape = self.ceil if self.balanced else (*own[:SEQUENCE], *self.ceil[SEQUENCE:])
        k, v = (self.cut(self.ctx.emit(aten.select.int, pair, 0, half), shape) for half in (0, 1))
        return k, v

    def cut(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """The leading part of ``x`` with this shape."""
        for dim, (want, have) in enumerate(zip(shape, x.meta["val"].shape, strict=True)):
            if not surely(want == have):
                x = self.ctx.emit(aten.index_select.default, x, dim, self.ctx.emit(aten.arange.default, want, dtype=torch.int64))
        return x

    def dealt(self, *tensors: tuple[fx.Node, int]) -> list[fx.Node]:
        """(tensor, its dim of the sequence) of blocks 2r and 2r + 1 as those of blocks r and 2n - 1 - r."""
        started = [(zigzag.spread(self.ctx, x, dim, self.axis), dim) for x, dim in tensors]
        return [zigzag.received(self.ctx, x, dim) for x, dim in started]

    def given_back(self, *tensors: tuple[fx.Node, int]) -> list[fx.Node]:
        """The inverse of ``dealt``."""
        started = [(zigzag.give_back(self.ctx, x, dim, self.axis), dim) for x, dim in tensors]
        return [zigzag.restored(self.ctx, x, dim, self.axis) for x, dim in started]

    def place(self, step: int) -> tuple[Any, Any, Any]:
        """(offset, first, keys) of ``block_attention`` in a step."""
        if not self.causal and (self.even or step == 0):
            return None, None, None
        return self._place_of_blocks(step) if self.balanced else (self._offset(step), None, self._count(step))

    def _owner(self, step: int) -> fx.Node:
        """The rank whose keys are here in a step."""
        owner = self.ctx.axis_index(self.axis)
        if not step:
            return owner
        return self.ctx.emit(aten.remainder.Scalar, self.ctx.emit(aten.sub.Tensor, owner, step), self.ranks)

    def _start(self, step: int) -> fx.Node:
        scaled = self.ctx.emit(aten.mul.Tensor, self._owner(step), self.ceil[SEQUENCE])
        return self.ctx.emit(aten.clamp_max.default, scaled, self.keys.shape[SEQUENCE])

    def _offset(self, step: int) -> Any:
        if not self.causal:
            return None
        return self.ctx.emit(aten.sub.Tensor, self.ctx.input_offset(self.query, SEQUENCE), self._start(step))

    def _count(self, step: int) -> Any:
        """Number of keys before padding; None if all."""
        if self.even or step == 0:
            return None
        left = self.ctx.emit(aten.add.Tensor, self.ctx.emit(aten.neg.default, self._start(step)), self.keys.shape[SEQUENCE])
        return self.ctx.emit(aten.clamp_max.default, left, self.ceil[SEQUENCE])

    def _place_of_blocks(self, step: int) -> tuple[Any, Any, Any]:
        """Of blocks r and 2n - 1 - r, both see the first block of an earlier rank, and the second sees both blocks of a later rank."""
        if step == 0:
            return self.ctx.emit(aten.full.default, [], 0, dtype=torch.int64), None, None
        half = self.ceil[SEQUENCE] // 2
        later = self.ctx.emit(aten.gt.Tensor, self._owner(step), self.ctx.axis_index(self.axis))
        first = self.ctx.emit(aten.mul.Tensor, later, half)
        return None, first, self.ctx.emit(aten.add.Tensor, first, half)

    def widened(self, x: fx.Node) -> fx.Node:
        """``x`` in the dtype in which results of blocks are added up."""
        dtype = lse_dtype(x.meta["val"])
        return x if x.meta["val"].dtype == dtype else self.ctx.emit(aten._to_copy.default, x, dtype=dtype)

    def converted(self, x: fx.Node, like: fx.Node) -> fx.Node:
        """A sum in the dtype of ``like``."""
        dtype = like.meta["val"].dtype
        return x if x.meta["val"].dtype == dtype else self.ctx.emit(aten._to_copy.default, x, dtype=dtype)
