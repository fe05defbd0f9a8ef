"""Emits an operator once for each piece of a cut (``follow_cut``), and joins pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxshard.graph.call import call_of
from fxshard.graph.planning_graph import is_tensor, operands
from fxshard.passes.after_lowering.follow_cut import ALONG, RESHAPES, SLICE, Cut, padding, read
from fxshard.passes.after_lowering.rewrite import Emitter
from fxshard.strategies.engine.registry import lookup, replaced

aten = torch.ops.aten


class Pieces:
    """The pieces of the nodes in ``cuts``, emitted on first use; ``arriving``: for the wait of a cut collective, the collectives of its
    pieces."""

    def __init__(self, cuts: Mapping[fx.Node, Cut], arriving: Mapping[fx.Node, Sequence[fx.Node]] | None = None) -> None:
        self.cuts, self.arriving = cuts, arriving or {}
        self.done: dict[tuple[fx.Node, int], fx.Node] = {}

    def __call__(self, emit: Emitter, node: fx.Node, cut: Cut, piece: int) -> fx.Node:
        """One piece: computed from pieces of the operands, or sliced if the node is not among ``cuts``."""
        if node not in self.cuts:
            return part(emit, node, cut, piece)
        if (node, piece) not in self.done:
            if node in self.arriving:
                made = emit(torch.ops._c10d_functional.wait_tensor.default, self.arriving[node][piece])
            else:
                made = self._made(emit, node, piece)
            self.done[node, piece] = made
        return self.done[node, piece]

    def whole(self, emit: Emitter, node: fx.Node) -> fx.Node:
        """Joins all pieces in their places."""
        cut = self.cuts[node]
        ends, parts = [0] * (max(k for k, _, _ in cut.runs) + 1), []
        for k, _, length in cut.runs:
            start, ends[k] = ends[k], ends[k] + length
            parts.append(_slice(emit, self(emit, node, cut, k), cut.dim, start, length))
        return emit(aten.cat.default, parts, cut.dim)

    def _made(self, emit: Emitter, node: fx.Node, piece: int) -> fx.Node:
        cut = self.cuts[node]
        reads, given = read(node, cut), operands(node)
        assert reads is not None, "a cut is followed before anything is emitted"
        own = [c if c is None else self.cuts.get(o, c) for o, c in zip(given, reads, strict=True)]

        def operand(k: int) -> fx.Node:
            o, c = given[k], own[k]
            return o if c is None else self(emit, o, c, piece)

        if node.target is aten.cat.default:
            return self._joined(emit, node, cut, piece, own, operand)
        first = own[0] if own else None
        if node.target is aten.slice.Tensor and first is not None:
            return self._sliced(emit, node, cut, piece, first, operand(0))
        if node.target is aten.constant_pad_nd.default:
            return _padded(emit, node, cut, piece, operand(0))
        shape = list(node.meta["val"].shape)
        shape[cut.dim] = cut.count(piece)
        if node.target in RESHAPES:
            return emit(aten.reshape.default, operand(0), shape)
        count = iter(range(len(own)))
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: operand(next(count)) if is_tensor(a) else a)
        entry = lookup(str(node.target))
        if entry is not None and entry.size_argument is not None:
            args = replaced(args, {entry.size_argument: shape})
        return emit(node.target, *args, **kwargs)

    def _joined(self, emit: Emitter, node: fx.Node, cut: Cut, piece: int, own: Sequence[Cut | None], operand: Any) -> fx.Node:
        have = [operand(k) for k, c in enumerate(own) if c is None or c.count(piece)]
        return have[0] if len(have) == 1 else emit(aten.cat.default, have, *node.args[1:])

    def _sliced(self, emit: Emitter, node: fx.Node, cut: Cut, piece: int, own: Cut, x: fx.Node) -> fx.Node:
        along = ALONG[SLICE](call_of(node), cut.dim)
        if along is None:  # another dim is sliced
            return emit(aten.slice.Tensor, x, *node.args[1:])
        start, stop = along[0].start, along[0].start + along[0].length
        return _slice(emit, x, cut.dim, own.count(piece, 0, start), own.count(piece, start, stop))


def _padded(emit: Emitter, node: fx.Node, cut: Cut, piece: int, x: fx.Node) -> fx.Node:
    before, behind = padding(call_of(node), cut.dim)
    size = len(cut.labels)
    pads: Any = list(node.args[1])
    place = 2 * (node.meta["val"].ndim - 1 - cut.dim)
    if place < len(pads):
        pads[place : place + 2] = [cut.count(piece, 0, before), cut.count(piece, size - behind)]
    return emit(aten.constant_pad_nd.default, x, pads, *node.args[2:]) if any(pads) else x


def part(emit: Emitter, node: fx.Node, cut: Cut, piece: int) -> fx.Node:
    """A piece of a whole tensor. It is copied if it would be non-contiguous in more than two dims: matrix products merge the dims of dense
    operands."""
    parts = [_slice(emit, node, cut.dim, start, length) for k, start, length in cut.runs if k == piece]
    if len(parts) != 1:
        return emit(aten.cat.default, parts, cut.dim) if parts else _slice(emit, node, cut.dim, 0, 0)
    value = parts[0].meta["val"]
    if value.is_contiguous() or value.ndim < 3 or not node.meta["val"].is_contiguous():
        return parts[0]
    return dense(emit, parts[0])


def dense(emit: Emitter, node: fx.Node) -> fx.Node:
    if node.meta["val"].is_contiguous():
        return node
    return emit(aten.clone.default, node, memory_format=torch.contiguous_format)


def _slice(emit: Emitter, x: fx.Node, dim: int, start: int, length: int) -> fx.Node:
    if start == 0 and length == x.meta["val"].shape[dim]:
        return x
    return emit(aten.slice.Tensor, x, dim, start, start + length)
