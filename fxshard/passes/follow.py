"""Follows a cut of one dim of a tensor through the operators around it, either way.

A cut gives each element of a dim the number of its piece, so that pieces may lie in several places: a shard's part of what is gathered is
one stretch in each rank's block. What an operator makes of a dim is told by its rule, the same by which plans are made: the outermost
factor of a dim is the operand's dim that has it too. Only where a dim is sliced, joined or padded, which no rule allows to cut, places
are reckoned here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fxshard._torch_compat import OpOverload
from fxshard.call import Call, call_of, is_hashable
from fxshard.errors import RuleError
from fxshard.planning_graph import UNKNOWN, operands, plain_shape
from fxshard.strategies.factors import Factors, resolve
from fxshard.strategies.registry import lookup, on_change
from fxshard.strategies.slicing import first_taken

aten = torch.ops.aten

NOBODY = -1
"""The piece of an element that is in none: it is not read."""

RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
"""Operators that give a tensor another shape: a piece is given the shape of the result's piece."""


@dataclass(frozen=True)
class Cut:
    """A dim and the number of the piece that each of its elements is in, int64 [size of the dim]."""

    dim: int
    labels: Tensor

    def count(self, piece: int, start: int = 0, stop: int | None = None) -> int:
        """Elements of a piece among those from ``start`` to ``stop``."""
        return int((self.labels[start:stop] == piece).sum())

    def runs(self) -> list[tuple[int, int, int]]:
        """(piece, start, length) of what lies side by side, in order."""
        pieces, lengths = torch.unique_consecutive(self.labels, return_counts=True)
        starts = lengths.cumsum(0) - lengths
        return list(zip(pieces.tolist(), starts.tolist(), lengths.tolist(), strict=True))

    def same(self, other: Cut) -> bool:
        return self.dim == other.dim and torch.equal(self.labels, other.labels)


@dataclass(frozen=True)
class Span:
    """``length`` steps along a dim of an operand, of ``unit`` elements each from ``start`` on, make those of the result from ``at`` on, of
    ``made`` elements each; the operand's dim has ``size`` elements."""

    dim: int
    size: int
    length: int
    start: int = 0
    unit: int = 1
    at: int = 0
    made: int = 1

    def back(self, labels: Tensor) -> Tensor | None:
        """Of the operand's dim, from those of the result's; None if a step is in two pieces."""
        steps = _steps(labels[self.at : self.at + self.length * self.made], self.made)
        return None if steps is None else _filled(self.size, self.start, steps.repeat_interleave(self.unit))

    def on(self, labels: Tensor, size: int) -> Tensor | None:
        """Of a result's dim of ``size``, from those of the operand's."""
        steps = _steps(labels[self.start : self.start + self.length * self.unit], self.unit)
        return None if steps is None else _filled(size, self.at, steps.repeat_interleave(self.made))


def _steps(labels: Tensor, unit: int) -> Tensor | None:
    grouped = labels.reshape(-1, unit)
    return grouped[:, 0] if bool((grouped == grouped[:, :1]).all()) else None


def _filled(size: int, start: int, labels: Tensor) -> Tensor:
    found = torch.full((size,), NOBODY)
    found[start : start + len(labels)] = labels
    return found


def united(a: Cut, b: Cut) -> Cut | None:
    """What both ask for; None where they disagree."""
    both = (a.labels != NOBODY) & (b.labels != NOBODY)
    if a.dim != b.dim or bool((a.labels != b.labels)[both].any()):
        return None
    return Cut(a.dim, torch.maximum(a.labels, b.labels))


def read(node: fx.Node, cut: Cut) -> list[Cut | None] | None:
    """Of each operand of ``node`` the cut that gives this one of its result, None for an operand that is read whole; None if none does."""
    found = spans(node, cut.dim)
    if found is None:
        return None
    cuts: list[Cut | None] = []
    for span in found:
        labels = None if span is None else span.back(cut.labels)
        if span is not None and labels is None:
            return None
        cuts.append(None if span is None or labels is None else Cut(span.dim, labels))
    return cuts


def made(node: fx.Node, given: Mapping[fx.Node, Cut]) -> Cut | None:
    """The cut of a result of operands that are cut as ``given``, the others being cut to it; None where they do not make one."""
    value = node.meta.get("val")
    for dim, size in enumerate(plain_shape(value.shape) if isinstance(value, Tensor) else ()):
        labels = _made(node, dim, size, given)
        if labels is not None and not bool((labels == NOBODY).any()):
            return Cut(dim, labels)
    return None


def _made(node: fx.Node, dim: int, size: int, given: Mapping[fx.Node, Cut]) -> Tensor | None:
    labels = torch.full((size,), NOBODY)
    for operand, span in zip(operands(node), spans(node, dim) or (), strict=False):
        if operand not in given:
            continue
        if span is None or span.dim != given[operand].dim:
            return None
        own = span.on(given[operand].labels, size)
        whole = None if own is None else united(Cut(dim, labels), Cut(dim, own))
        if whole is None:
            return None
        labels = whole.labels
    return labels


def spans(node: fx.Node, dim: int) -> tuple[Span | None, ...] | None:
    """For each operand of ``node`` what of it makes a dim of the result, None for one that is read whole; None where no cut is possible."""
    value = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(value, Tensor) or UNKNOWN in plain_shape(value.shape):
        return None
    along = ALONG.get(node.target)
    return (along(node, dim) if along else None) or _by_rule(node, dim)


def _slice(node: fx.Node, dim: int) -> tuple[Span, ...] | None:
    given: Any = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    shape = plain_shape(operands(node)[0].meta["val"].shape)
    if _place(given[0], shape) != dim or given[3] != 1:
        return None
    return (Span(dim, shape[dim], node.meta["val"].shape[dim], first_taken(given[1], shape[dim])),)


def _cat(node: fx.Node, dim: int) -> tuple[Span, ...] | None:
    along: Any = node.args[1] if len(node.args) > 1 else 0
    shapes = [plain_shape(x.meta["val"].shape) for x in operands(node)]
    if _place(along, shapes[0]) != dim or len({len(s) for s in shapes}) > 1:
        return None
    ends = [sum(s[dim] for s in shapes[:k]) for k in range(len(shapes))]
    return tuple(Span(dim, s[dim], s[dim], at=at) for s, at in zip(shapes, ends, strict=True))


def _pad(node: fx.Node, dim: int) -> tuple[Span, ...] | None:
    before, behind = padding(node, dim)
    size = operands(node)[0].meta["val"].shape[dim]
    return (Span(dim, size, size, at=before),) if before >= 0 and behind >= 0 else None


def padding(node: fx.Node, dim: int) -> tuple[int, int]:
    """How many elements a ``constant_pad_nd`` adds before and behind a dim."""
    pads: Any = node.args[1]
    place = 2 * (node.meta["val"].ndim - 1 - dim)
    return (pads[place], pads[place + 1]) if place < len(pads) else (0, 0)


def _place(along: Any, shape: tuple[int, ...]) -> int:
    return int(along) % max(len(shape), 1)


ALONG: dict[Any, Callable[[fx.Node, int], tuple[Span, ...] | None]] = {
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
}
"""Operators that move places along a dim."""


def _by_rule(node: fx.Node, dim: int) -> tuple[Span | None, ...] | None:
    call = call_of(node)
    found = _factors(call) if is_hashable(call) else None
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
    """The factors of an operator that runs on pieces as it is, but for sizes in its arguments."""
    entry = lookup(call.op)
    if entry is None or (entry.local is not None and call.op not in _PLAIN):
        return None
    try:
        return resolve(entry.rule(call), call)
    except RuleError:
        return None


_PLAIN = {str(op) for op in (*RESHAPES, aten.slice.Tensor)}
on_change(_factors.cache_clear)
