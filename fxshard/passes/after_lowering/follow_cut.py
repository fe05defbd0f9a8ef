"""Propagates a cut of one dim of a tensor through operators, forwards and backwards.

A cut labels each element of a dim with the number of its piece. Pieces need not be contiguous: in a gathered tensor, a part of every shard
is one run in each rank's block. Propagation uses the sharding rules: an operand's dim belongs to a dim of the result if both have the same
outermost factor. Slices, concatenations and paddings of the cut dim, which no sharding rule allows, are computed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch_compat import OpOverload
from fxshard.errors import RuleError
from fxshard.graph.call import Call, call_of
from fxshard.graph.planning_graph import UNKNOWN, is_tensor, operands
from fxshard.strategies.engine.factors import Factors, resolve
from fxshard.strategies.engine.registry import lookup, on_change
from fxshard.strategies.tensors.slicing import first_taken

aten = torch.ops.aten

UNREAD = -1
"""The label of an element that is in no piece, because nobody reads it."""

RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
"""Operators that reshape a tensor: a piece is reshaped to the result's piece."""


@dataclass(frozen=True, eq=False)
class Cut:
    """A dim and the piece number of each of its elements, integers [size of the dim].

    Cuts compare by identity: equal operators share the cuts derived from one.
    """

    dim: int
    labels: Tensor

    def count(self, piece: int, start: int = 0, stop: int | None = None) -> int:
        """Number of elements of a piece among those from ``start`` to ``stop``."""
        if start == 0 and stop is None:
            return self._sizes[piece]
        end = len(self.labels) if stop is None else stop
        return sum(max(0, min(at + length, end) - max(at, start)) for k, at, length in self.runs if k == piece)

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(piece, start, length) of the contiguous runs, in order."""
        pieces, lengths = torch.unique_consecutive(self.labels, return_counts=True)
        starts = lengths.cumsum(0) - lengths
        return list(zip(pieces.tolist(), starts.tolist(), lengths.tolist(), strict=True))

    @cached_property
    def _sizes(self) -> Counter[int]:
        found = Counter[int]()
        for piece, _, length in self.runs:
            found[piece] += length
        return found

    def same(self, other: Cut) -> bool:
        return self is other or (self.dim == other.dim and torch.equal(self.labels, other.labels))


@dataclass(frozen=True)
class Span:
    """A correspondence between a dim of an operand, of ``size`` elements, and a dim of the result: ``length`` steps, in the operand of
    ``unit`` elements each from ``start`` on, in the result of ``made`` elements each from ``at`` on."""

    dim: int
    size: int
    length: int
    start: int = 0
    unit: int = 1
    at: int = 0
    made: int = 1

    def operand_labels(self, labels: Tensor) -> Tensor | None:
        """Labels of the operand's dim from those of the result's; None if a step would be in two pieces."""
        steps = _steps(labels[self.at : self.at + self.length * self.made], self.made)
        return None if steps is None else _labelled(self.size, self.start, steps.repeat_interleave(self.unit))

    def result_labels(self, labels: Tensor, size: int) -> Tensor | None:
        """Labels of the result's dim of ``size`` from those of the operand's."""
        steps = _steps(labels[self.start : self.start + self.length * self.unit], self.unit)
        return None if steps is None else _labelled(size, self.at, steps.repeat_interleave(self.made))


def _steps(labels: Tensor, unit: int) -> Tensor | None:
    grouped = labels.reshape(-1, unit)
    return grouped[:, 0] if bool((grouped == grouped[:, :1]).all()) else None


def _labelled(size: int, start: int, labels: Tensor) -> Tensor:
    found = torch.full((size,), UNREAD, dtype=labels.dtype)
    found[start : start + len(labels)] = labels
    return found


def merged(a: Cut, b: Cut) -> Cut | None:
    """A cut that satisfies both; None if they disagree."""
    if a is b:
        return a
    both = (a.labels != UNREAD) & (b.labels != UNREAD)
    if a.dim != b.dim or bool((a.labels != b.labels)[both].any()):
        return None
    return Cut(a.dim, torch.maximum(a.labels, b.labels))


def read(node: fx.Node, cut: Cut) -> tuple[Cut | None, ...] | None:
    """For each operand of ``node``, the cut that yields this cut of the result (None if read whole); None if there is none."""
    call = _followed(node)
    return None if call is None else _read(call, cut)


def made(node: fx.Node, given: Mapping[fx.Node, Cut]) -> Cut | None:
    """The cut of the result if operands are cut as ``given`` and the others to match; None if it is not a cut."""
    call = _followed(node)
    return None if call is None else _made(call, tuple(map(given.get, operands(node))))


def _followed(node: fx.Node) -> Call | None:
    """The call of an operator whose result can be cut."""
    if not isinstance(node.target, OpOverload) or not is_tensor(node):
        return None
    call = call_of(node)
    (result,) = call.outputs
    return call if result is not None and UNKNOWN not in result.shape and call.is_hashable else None


CACHE_SIZE = 1024
"""Number of cached cuts; their labels take the memory."""


@lru_cache(maxsize=CACHE_SIZE)
def _read(call: Call, cut: Cut) -> tuple[Cut | None, ...] | None:
    found = spans(call, cut.dim)
    if found is None:
        return None
    cuts: list[Cut | None] = []
    for span in found:
        labels = None if span is None else span.operand_labels(cut.labels)
        if span is not None and labels is None:
            return None
        cuts.append(None if span is None or labels is None else Cut(span.dim, labels))
    return tuple(cuts)


@lru_cache(maxsize=CACHE_SIZE)
def _made(call: Call, given: tuple[Cut | None, ...]) -> Cut | None:
    (result,) = call.outputs
    for dim, size in enumerate(result.shape if result is not None else ()):
        labels = _made_along(call, dim, size, given)
        if labels is not None and not bool((labels == UNREAD).any()):
            return Cut(dim, labels)
    return None


def _made_along(call: Call, dim: int, size: int, given: tuple[Cut | None, ...]) -> Tensor | None:
    labels = torch.full((size,), UNREAD)
    for cut, span in zip(given, spans(call, dim) or (), strict=False):
        if cut is None:
            continue
        if span is None or span.dim != cut.dim:
            return None
        own = span.result_labels(cut.labels, size)
        whole = None if own is None else merged(Cut(dim, labels), Cut(dim, own))
        if whole is None:
            return None
        labels = whole.labels
    return labels


def spans(call: Call, dim: int) -> tuple[Span | None, ...] | None:
    """For each operand, its correspondence with a dim of the result, None if read whole; None if no cut is possible."""
    along = ALONG.get(call.op)
    return (along(call, dim) if along else None) or _by_rule(call, dim)


def _slice(call: Call, dim: int) -> tuple[Span, ...] | None:
    given: Any = (*call.args[1:], *(0, None, None, 1)[len(call.args) - 1 :])
    shape, (result,) = call.operands[0].shape, call.outputs
    if result is None or _normalised_dim(given[0], shape) != dim or given[3] != 1:
        return None
    return (Span(dim, shape[dim], result.shape[dim], first_taken(given[1], shape[dim])),)


def _cat(call: Call, dim: int) -> tuple[Span, ...] | None:
    along: Any = call.args[1] if len(call.args) > 1 else 0
    shapes = [x.shape for x in call.operands]
    if _normalised_dim(along, shapes[0]) != dim or len({len(s) for s in shapes}) > 1:
        return None
    ends = [sum(s[dim] for s in shapes[:k]) for k in range(len(shapes))]
    return tuple(Span(dim, s[dim], s[dim], at=at) for s, at in zip(shapes, ends, strict=True))


def _pad(call: Call, dim: int) -> tuple[Span, ...] | None:
    before, behind = padding(call, dim)
    size = call.operands[0].shape[dim]
    return (Span(dim, size, size, at=before),) if before >= 0 and behind >= 0 else None


def padding(call: Call, dim: int) -> tuple[int, int]:
    """Number of elements that a ``constant_pad_nd`` adds before and after a dim."""
    pads: Any = call.args[1]
    place = 2 * (call.operands[0].ndim - 1 - dim)
    return (pads[place], pads[place + 1]) if place < len(pads) else (0, 0)


def _normalised_dim(along: Any, shape: tuple[int, ...]) -> int:
    return int(along) % max(len(shape), 1)


SLICE = str(aten.slice.Tensor)

ALONG: dict[str, Callable[[Call, int], tuple[Span, ...] | None]] = {
    SLICE: _slice,
    str(aten.cat.default): _cat,
    str(aten.constant_pad_nd.default): _pad,
}
"""Operators that move elements along a dim."""


@lru_cache(maxsize=4096)
def _by_rule(call: Call, dim: int) -> tuple[Span | None, ...] | None:
    found = _factors(call)
    if found is None or len(found[0].outputs) != 1 or not found[0].outputs[0]:
        return None
    rule, sizes = found
    (dims,), (whole,) = rule.outputs, call.outputs
    assert dims is not None and whole is not None
    if not dims[dim] or dims[dim][0] in rule.replicated or not whole.shape[dim]:
        return None
    factor = dims[dim][0]
    steps, made_of = sizes[factor], whole.shape[dim] // sizes[factor]
    cut: list[Span | None] = []
    for names, meta in zip(rule.operands, call.operands, strict=True):
        places = [d for d, own in enumerate(names) if factor in own]
        if len(places) > 1 or any(names[d][0] != factor for d in places):
            return None
        whole_dims = [Span(d, meta.shape[d], steps, unit=meta.shape[d] // steps, made=made_of) for d in places]
        cut.append(whole_dims[0] if whole_dims else None)
    return tuple(cut)


@lru_cache(maxsize=4096)
def _factors(call: Call) -> tuple[Factors, dict[str, Any]] | None:
    """The factors of an operator that can run on pieces unchanged, except for sizes in its arguments."""
    entry = lookup(call.op)
    if entry is None or (entry.local is not None and call.op not in _PLAIN):
        return None
    try:
        return resolve(entry.rule(call), call)
    except RuleError:
        return None


_PLAIN = {str(op) for op in (*RESHAPES, aten.slice.Tensor)}
for kept in (_factors, _by_rule, _read, _made):
    on_change(kept.cache_clear)
