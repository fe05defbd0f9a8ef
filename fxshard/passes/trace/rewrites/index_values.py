"""What is known about a value that depends on nothing but positions: an index arithmetic over ``arange``, comparisons, and masks of these.

Nothing is computed, so a mask of 131,072 x 131,072 costs what one of 4 x 4 does, and sizes may be symbolic. Transformers writes masks in
this form (positions, their differences, ``cumsum`` of where a sequence starts anew), and so do ``tril``, ``triu`` and ``masked_fill``.
An operator that is not listed here makes its result unknown, never wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.planning_graph import is_tensor

aten = torch.ops.aten
WHOLE = (torch.int64, torch.int32)
"""Dtypes of positions: a sum of a few of them does not wrap around."""
Number = Any
"""An int, float or bool, or a symbolic int."""


@dataclass(frozen=True)
class Affine:
    """The value ``start + sum_d steps[d] * i_d`` at position i. ``steps``: one whole number for each dim, 0 where the size is 1."""

    start: Number
    steps: tuple[int, ...]

    @property
    def is_constant(self) -> bool:
        return not any(self.steps)

    def over(self, dims: int) -> Affine:
        """The same value broadcast to ``dims`` dims."""
        return replace(self, steps=(0,) * (dims - len(self.steps)) + self.steps)

    def least(self, shape: Sequence[Number]) -> Number:
        """The least value over all positions of ``shape``."""
        return self.start + sum(step * (size - 1) for step, size in zip(self.steps, shape, strict=True) if step < 0)

    def negated(self) -> Affine:
        return Affine(-self.start, tuple(-step for step in self.steps))


@dataclass(frozen=True)
class Where:
    """``yes`` at the positions where all of ``reached`` are at least 0, else ``no``: two numbers, or True and False for a mask."""

    reached: tuple[Affine, ...]
    yes: Number
    no: Number


Known = Affine | Where


def known_values(graph: fx.Graph) -> dict[fx.Node, Known]:
    """What is known about the values of a graph, by node; a node that is missing depends on something else than positions."""
    found: dict[fx.Node, Known] = {}
    for node in graph.nodes:
        rule = _RULES.get(node.target) if node.op == "call_function" and is_tensor(node) else None
        value = None if rule is None else rule(_Call(node, found))
        if value is not None and (not isinstance(value, Affine) or value.is_constant or node.meta["val"].dtype in WHOLE):
            found[node] = _canonical(value, node.meta["val"].shape)
    return found


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    known: dict[fx.Node, Known]

    @property
    def dims(self) -> int:
        return self.node.meta["val"].dim()

    @property
    def shape(self) -> Sequence[Number]:
        return self.node.meta["val"].shape

    def number(self, position: int, default: Number = None) -> Number:
        """A number among the arguments; None if it is a tensor, or ``default`` if it is missing."""
        value = self.node.args[position] if position < len(self.node.args) else default
        value = value.meta.get("val") if isinstance(value, fx.Node) else value
        return value if isinstance(value, bool | int | float | torch.SymInt) else None

    def value(self, position: int) -> Known | None:
        """What is known about an argument."""
        at = self.node.args[position]
        number = self.number(position)
        return self.known.get(at) if isinstance(at, fx.Node) and number is None else None if number is None else Affine(number, ())

    def affine(self, position: int) -> Affine | None:
        value = self.value(position)
        return value if isinstance(value, Affine) else None


def _canonical(value: Known, shape: Sequence[Number]) -> Known:
    """No steps along dims of size 1; conditions that always or never hold are settled."""
    if isinstance(value, Affine):
        return _without_ones(value, shape)
    unsettled = tuple(one for one in value.reached if not surely(one.least(shape) >= 0))
    never = any(surely(one.negated().least(shape) > 0) for one in unsettled)
    if never or not unsettled:
        return Affine(value.no if never else value.yes, (0,) * len(shape))
    return replace(value, reached=tuple(_without_ones(one, shape) for one in unsettled))


def _without_ones(value: Affine, shape: Sequence[Number]) -> Affine:
    return replace(value, steps=tuple(0 if surely(size == 1) else step for step, size in zip(value.steps, shape, strict=True)))


def _arange(call: _Call) -> Known | None:
    start, step = (0, 1) if len(call.node.args) == 1 else (call.number(0), call.number(2, 1))
    return Affine(start, (step,)) if _is_whole(start) and isinstance(step, int) else None


def _is_whole(number: Number) -> bool:
    return isinstance(number, int | torch.SymInt) and not isinstance(number, bool)


def _filled(position: int) -> Callable[[_Call], Known | None]:
    def rule(call: _Call) -> Known | None:
        number = call.number(position)
        return None if number is None else _of_dtype(number, call)

    return rule


def _always(number: int) -> Callable[[_Call], Known | None]:
    return lambda call: _of_dtype(number, call)


def _of_dtype(number: Number, call: _Call) -> Affine:
    """A constant as a tensor of the call's dtype has it."""
    rounded = number if isinstance(number, torch.SymInt) else torch.tensor(number).to(call.node.meta["val"].dtype).item()
    return Affine(rounded, (0,) * call.dims)


def _whole_operands(call: _Call) -> tuple[Affine, Affine] | None:
    """Both operands, broadcast, if they are whole numbers."""
    a, b = call.affine(0), call.affine(1)
    if a is None or b is None or not (_is_whole(a.start) and _is_whole(b.start)):
        return None
    return a.over(call.dims), b.over(call.dims)


def _combined(call: _Call, combine: Callable[[Number, Number], Number], scale: int = 1) -> Affine | None:
    operands = _whole_operands(call)
    if operands is None or call.node.kwargs:
        return None
    a, b = operands
    return Affine(combine(a.start, b.start), tuple(x + scale * y for x, y in zip(a.steps, b.steps, strict=True)))


def _added(call: _Call) -> Known | None:
    return _combined(call, operator.add)


def _subtracted(call: _Call) -> Known | None:
    return _combined(call, operator.sub, -1)


def _compared(first: int, second: int, margin: int) -> Callable[[_Call], Known | None]:
    """Where argument ``first`` - argument ``second`` - ``margin`` is at least 0, of whole numbers."""

    def rule(call: _Call) -> Known | None:
        operands = _whole_operands(call)
        if operands is None:
            return None
        a, b = operands[first], operands[second]
        difference = Affine(a.start - b.start - margin, tuple(x - y for x, y in zip(a.steps, b.steps, strict=True)))
        return Where((difference,), True, False)

    return rule


def _equal(same: bool) -> Callable[[_Call], Known | None]:
    """``eq`` or ``ne`` of values whose difference is one number everywhere."""

    def rule(call: _Call) -> Known | None:
        operands = _whole_operands(call)
        if operands is None:
            return None
        a, b = operands
        if a.steps != b.steps or not (surely(a.start == b.start) or surely(a.start != b.start)):
            return None
        return Affine(surely(a.start == b.start) == same, (0,) * call.dims)

    return rule


def _and(call: _Call) -> Known | None:
    a, b = (_mask(call.value(position), call.dims) for position in (0, 1))
    return None if a is None or b is None else Where((*a.reached, *b.reached), True, False)


def _mask(value: Known | None, dims: int) -> Where | None:
    """A bool as a condition over ``dims`` dims. A condition that never holds is -1 >= 0."""
    if isinstance(value, Affine) and isinstance(value.start, bool):
        return Where(() if value.start else (Affine(-1, (0,) * dims),), True, False)
    if isinstance(value, Where) and (value.yes, value.no) == (True, False) and isinstance(value.yes, bool):
        return replace(value, reached=tuple(one.over(dims) for one in value.reached))
    return None


def _not(call: _Call) -> Known | None:
    value = call.value(0)
    if isinstance(value, Affine) and isinstance(value.start, bool):
        return replace(value, start=not value.start)
    mask = _mask(value, call.dims)
    return None if mask is None else opposite(mask)


def opposite(value: Where) -> Where | None:
    """The same value with the condition that ``no`` needs; None unless it is one condition. As a mask: where ``value`` does not hold."""
    if len(value.reached) != 1:
        return None
    one = value.reached[0].negated()
    return replace(value, reached=(replace(one, start=one.start - 1),))


def _chosen(condition: int, yes: int, no: int) -> Callable[[_Call], Known | None]:
    """``where`` and ``masked_fill`` of two numbers."""

    def rule(call: _Call) -> Known | None:
        mask, a, b = _mask(call.value(condition), call.dims), call.affine(yes), call.affine(no)
        if mask is None or a is None or b is None or not (a.is_constant and b.is_constant):
            return None
        return replace(mask, yes=a.start, no=b.start)

    return rule


def _triangle(sign: int) -> Callable[[_Call], Known | None]:
    """``tril`` (1) or ``triu`` (-1) of one number: row - column + diagonal is at least 0, or at most 0."""

    def rule(call: _Call) -> Known | None:
        value, diagonal = call.affine(0), call.number(1, 0)
        if value is None or not value.is_constant or not isinstance(diagonal, int) or isinstance(value.start, torch.SymInt):
            return None
        line = Affine(sign * diagonal, (*(0,) * (call.dims - 2), sign, -sign))
        return Where((line,), value.start, type(value.start)(0))

    return rule


def _same(call: _Call) -> Known | None:
    return call.value(0)


def _copied(call: _Call) -> Known | None:
    """A cast between whole numbers, or of a mask to what it is."""
    value, dtype = call.value(0), call.node.meta["val"].dtype
    before = call.node.args[0].meta["val"].dtype
    return value if dtype == before or not (dtype.is_floating_point or dtype.is_complex or torch.bool in (dtype, before)) else None


def _along(value: Known, change: Callable[[Affine], Affine]) -> Known:
    return change(value) if isinstance(value, Affine) else replace(value, reached=tuple(map(change, value.reached)))


def _unsqueezed(call: _Call) -> Known | None:
    value, dim = call.value(0), call.number(1) % call.dims
    return None if value is None else _along(value, lambda one: replace(one, steps=(*one.steps[:dim], 0, *one.steps[dim:])))


def _expanded(call: _Call) -> Known | None:
    value = call.value(0)
    return None if value is None else _along(value, lambda one: one.over(call.dims))


def _sliced(call: _Call) -> Known | None:
    value, start, step = call.value(0), call.number(2, 0), call.number(4, 1)
    dim = call.number(1, 0) % call.dims
    start = 0 if start is None and call.node.args[2:3] == (None,) else start
    if value is None or not _is_whole(start) or not surely(start >= 0) or not isinstance(step, int):
        return None
    return _along(
        value, lambda one: Affine(one.start + start * one.steps[dim], (*one.steps[:dim], one.steps[dim] * step, *one.steps[dim + 1 :]))
    )


def _selected(call: _Call) -> Known | None:
    value, dim, index = call.value(0), call.number(1) % (call.dims + 1), call.number(2)
    if value is None or not _is_whole(index) or not surely(index >= 0):
        return None
    return _along(value, lambda one: Affine(one.start + index * one.steps[dim], (*one.steps[:dim], *one.steps[dim + 1 :])))


def _joined(call: _Call) -> Known | None:
    """``cat`` of pieces that continue each other."""
    nodes: Sequence[fx.Node] = call.node.args[0]
    pieces = [piece for piece in map(call.known.get, nodes) if isinstance(piece, Affine) and len(piece.steps) == call.dims]
    if len(pieces) < len(nodes):
        return None
    dim = call.number(1, 0) % call.dims
    sizes = [node.meta["val"].shape[dim] for node in nodes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    guide = next((i for i, size in enumerate(sizes) if not surely(size == 1)), 0)
    step, steps = pieces[guide].steps[dim], pieces[guide].steps
    whole = Affine(pieces[guide].start - step * starts[guide], steps)
    for piece, size, start in zip(pieces, sizes, starts, strict=True):
        there = (*steps[:dim], 0, *steps[dim + 1 :]) if surely(size == 1) else steps
        if piece.steps != there or not surely(piece.start == whole.start + step * start):
            return None
    return whole


def _indexed(call: _Call) -> Known | None:
    """``value[i_0, i_1, ...]`` with an index for each dim, none of them negative."""
    value = call.affine(0)
    nodes = call.node.args[1]
    if value is None or len(nodes) != len(value.steps) or any(node is None or node.meta["val"].dtype == torch.bool for node in nodes):
        return None
    total = Affine(value.start, (0,) * call.dims)
    for step, node in zip(value.steps, nodes, strict=True):
        index = call.known.get(node)
        if not step:
            continue
        if not isinstance(index, Affine) or not _is_whole(index.start) or not surely(index.least(node.meta["val"].shape) >= 0):
            return None
        index = index.over(call.dims)
        steps = tuple(a + step * b for a, b in zip(total.steps, index.steps, strict=True))
        total = Affine(total.start + step * index.start, steps)
    return total


def _summed(call: _Call) -> Known | None:
    """``cumsum`` of zeros."""
    value = call.affine(0)
    return Affine(0, (0,) * call.dims) if value is not None and value.is_constant and surely(value.start == 0) else None


_RULES: dict[Any, Callable[[_Call], Known | None]] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full.default: _filled(1),
    aten.full_like.default: _filled(1),
    aten.scalar_tensor.default: _filled(0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default), _always(1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), _always(0)),
    aten.add.Tensor: _added,
    aten.sub.Tensor: _subtracted,
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _compared(0, 1, 0)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _compared(0, 1, 1)),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _compared(1, 0, 0)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _compared(1, 0, 1)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equal(True)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equal(False)),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _and),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
    aten.where.self: _chosen(0, 1, 2),
    aten.masked_fill.Scalar: _chosen(1, 2, 0),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    aten.clone.default: _same,
    aten._to_copy.default: _copied,
    aten.unsqueeze.default: _unsqueezed,
    aten.expand.default: _expanded,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.cat.default: _joined,
    aten.index.Tensor: _indexed,
    aten.cumsum.default: _summed,
}
