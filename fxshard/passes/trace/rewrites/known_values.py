"""Which values of a graph depend on nothing but positions, with their formulas.

Nothing is computed, so a mask of 131,072 x 131,072 costs what one of 4 x 4 does, and sizes may be symbolic. Transformers writes masks in
this form (positions, their differences, ``cumsum`` of where a sequence starts anew), and so do ``tril``, ``triu`` and ``masked_fill``.
What an operator without a rule here makes is unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import surely
from fxshard.graph.planning_graph import is_tensor
from fxshard.passes.trace.rewrites.index_values import Affine, Known, Number, Where, Whole, as_held, is_whole, opposite, settled

aten = torch.ops.aten


def known_values(wanted: Iterable[fx.Node]) -> dict[fx.Node, Known]:
    """What is known about these nodes, and about those that they are made of; what is missing depends on something else than positions."""
    found: dict[fx.Node, Known] = {}
    for node in _ancestors(wanted):
        rule = _RULES.get(node.target) if node.op == "call_function" and is_tensor(node) else None
        value = None if rule is None else rule(_Call(node, found))
        value = None if value is None else settled(value, node.meta["val"])
        if value is not None:
            found[node] = value
    return found


def _ancestors(wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """These nodes and all that they are made of, in the order of the graph."""
    pending, seen = list(wanted), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return sorted(seen)


@dataclass(frozen=True)
class _Call:
    node: fx.Node
    known: dict[fx.Node, Known]

    @property
    def result(self) -> torch.Tensor:
        return self.node.meta["val"]

    @property
    def dims(self) -> int:
        return self.result.dim()

    def arg(self, position: int, default: Any = None) -> Any:
        """An argument; of a node that is a number, its value."""
        value = self.node.args[position] if position < len(self.node.args) else default
        number = value.meta.get("val") if isinstance(value, fx.Node) else None
        return number if isinstance(number, bool | int | float | torch.SymInt) else value

    def value(self, position: int) -> Known | None:
        """What is known about an argument; a number is that number everywhere."""
        value = self.arg(position)
        if isinstance(value, fx.Node):
            return self.known.get(value)
        if isinstance(value, torch.SymInt):
            return Affine(value, ())
        return Where((), value, value) if isinstance(value, bool | int | float) else None

    def affine(self, position: int) -> Affine | None:
        """An argument that is a whole number at each position, over the result's dims."""
        value = _whole_number(self.value(position), 0)
        return None if value is None else value.over(self.dims)

    def of(self, node: fx.Node) -> Affine | None:
        """The same of a node in a list."""
        return _whole_number(self.known.get(node), node.meta["val"].dim())

    def input(self, position: int = 0) -> torch.Tensor:
        return self.node.args[position].meta["val"]


def _whole_number(value: Known | None, dims: int) -> Affine | None:
    """A value that is a whole number at each position, one number also over ``dims`` dims."""
    if isinstance(value, Where) and not value.reached and isinstance(value.yes, int) and not isinstance(value.yes, bool):
        return Affine(value.yes, (0,) * dims)
    return value if isinstance(value, Affine) else None


Rule = Callable[[_Call], Known | None]


def _arange(call: _Call) -> Known | None:
    start, step = (0, 1) if len(call.node.args) == 1 else (call.arg(0), call.arg(2, 1))
    if not isinstance(step, int) or not isinstance(start, int | torch.SymInt):
        return None
    return Affine(start, (step,))


def _filled(position: int) -> Rule:
    def rule(call: _Call) -> Known | None:
        number = call.arg(position)
        if isinstance(number, torch.SymInt):
            return Affine(number, (0,) * call.dims)
        return Where((), number, number) if isinstance(number, bool | int | float) else None

    return rule


def _always(number: int) -> Rule:
    return lambda call: Where((), number, number)


def _sum(times: int) -> Rule:
    """``add`` (1) or ``sub`` (-1) of whole numbers, or of a value and 0."""

    def rule(call: _Call) -> Known | None:
        if call.node.kwargs:
            return None
        a, b = call.affine(0), call.affine(1)
        if a is not None and b is not None:
            return a.plus(b, times)
        first, second = call.value(0), call.value(1)
        if _is_zero(second):
            return _broadcast(first, call.dims)
        return _broadcast(second, call.dims) if _is_zero(first) and times == 1 else None

    return rule


def _is_zero(value: Known | None) -> bool:
    return isinstance(value, Where) and not value.reached and value.yes == 0


def _product(call: _Call) -> Known | None:
    """Of positions and a number."""
    a, b = call.affine(0), call.affine(1)
    if a is None or b is None:
        return None
    times, by = (a, b) if any(a.steps) else (b, a)
    if any(by.steps) or not isinstance(by.start, int):
        return None
    return Affine(times.start * by.start, tuple(step * by.start for step in times.steps))


def _compared(compare: Callable[[Any, Any], bool], first: int, margin: int) -> Rule:
    """Of whole numbers: where argument ``first`` - the other one - ``margin`` is at least 0. Of a value of two numbers: of each of them."""

    def rule(call: _Call) -> Known | None:
        return _compared_numbers(call, compare) or _reached(call, first, margin)

    return rule


def _reached(call: _Call, first: int, margin: int) -> Known | None:
    a, b = call.affine(first), call.affine(1 - first)
    if a is None or b is None or not _holds_scalar(call):
        return None
    difference = a.plus(b, -1)
    return Where((replace(difference, start=difference.start - margin),), True, False)


def _equal(compare: Callable[[Any, Any], bool]) -> Rule:
    """``eq`` or ``ne``: of whole numbers, if their difference is one number everywhere, which is 0 or is not."""

    def rule(call: _Call) -> Known | None:
        a, b = call.affine(0), call.affine(1)
        if a is not None and b is not None and a.steps == b.steps and _holds_scalar(call):
            equal, unequal = surely(a.start == b.start), surely(a.start != b.start)
            if equal or unequal:
                return Where((), compare(0, 0 if equal else 1), False)
        return _compared_numbers(call, compare)

    return rule


def _compared_numbers(call: _Call, compare: Callable[[Any, Any], bool]) -> Known | None:
    """A value of two numbers compared with one number; None where torch compares in another dtype than the value's."""
    value, other = call.value(0), call.value(1)
    if not isinstance(value, Where) or not isinstance(other, Where) or other.reached or not isinstance(call.node.args[0], fx.Node):
        return None
    dtype, second = call.input().dtype, call.node.args[1]
    if (isinstance(second, fx.Node) and is_tensor(second) and second.meta["val"].dtype != dtype) or _promotes(dtype, other.yes):
        return None
    number = other.yes if dtype == torch.bool else as_held(other.yes, dtype)
    if number is None or number != other.yes:  # a device may round it, or compare in a wider dtype
        return None
    return replace(value.over(call.dims), yes=compare(value.yes, number), no=compare(value.no, number))


def _promotes(dtype: torch.dtype, number: Number) -> bool:
    """Whether torch compares a tensor of ``dtype`` with ``number`` in another dtype."""
    return isinstance(number, float) and not dtype.is_floating_point


def _holds_scalar(call: _Call) -> bool:
    """Whether torch compares what is given: it casts a number, and a tensor of no dims, to the dtype of a tensor that has some."""
    tensors = [n.meta["val"] for n in call.node.args if isinstance(n, fx.Node) and is_tensor(n)]
    if len({t.dim() == 0 for t in tensors}) > 1 and len({t.dtype for t in tensors}) > 1:
        return False
    numbers = [n for n in map(call.arg, range(2)) if isinstance(n, int | torch.SymInt)]
    return all(_holds(tensor.dtype, number) for number in numbers for tensor in tensors)


def _holds(dtype: torch.dtype, number: Whole) -> bool:
    return dtype == torch.int64 if isinstance(number, torch.SymInt) else is_whole(dtype) and as_held(number, dtype) is not None


def _and(call: _Call) -> Known | None:
    a, b = (_mask(call.value(position), call.dims) for position in (0, 1))
    return None if a is None or b is None else Where((*a.reached, *b.reached), True, False)


def _mask(value: Known | None, dims: int) -> Where | None:
    """A bool as conditions over ``dims`` dims: True where they hold. That it never holds is the condition -1 >= 0."""
    if not isinstance(value, Where) or not isinstance(value.yes, bool):
        return None
    if not value.reached:
        return Where(() if value.yes else (Affine(-1, (0,) * dims),), True, False)
    turned = value if value.yes else opposite(value)
    return None if turned is None else turned.over(dims)


def _not(call: _Call) -> Known | None:
    value = call.value(0)
    return replace(value, yes=not value.yes, no=not value.no) if isinstance(value, Where) and isinstance(value.yes, bool) else None


def _chosen(condition: int, yes: int, no: int) -> Rule:
    """``where`` and ``masked_fill`` of two numbers."""

    def rule(call: _Call) -> Known | None:
        mask, a, b = _mask(call.value(condition), call.dims), call.value(yes), call.value(no)
        if mask is None or not isinstance(a, Where) or not isinstance(b, Where) or a.reached or b.reached:
            return None
        return replace(mask, yes=a.yes, no=b.yes)

    return rule


def _triangle(sign: int) -> Rule:
    """``tril`` (1) or ``triu`` (-1) of one number: row - column + diagonal is at least 0, or at most 0."""

    def rule(call: _Call) -> Known | None:
        value, diagonal = call.value(0), call.arg(1, 0)
        if not isinstance(value, Where) or value.reached or not isinstance(diagonal, int | torch.SymInt):
            return None
        line = Affine(sign * diagonal, (*(0,) * (call.dims - 2), sign, -sign))
        return Where((line,), value.yes, 0)

    return rule


def _copied(call: _Call) -> Known | None:
    """A cast: numbers are what the new dtype holds of them, and positions stay whole."""
    return call.value(0) if set(call.node.kwargs) <= {"dtype", "device", "layout", "pin_memory", "memory_format", "non_blocking"} else None


def _along(value: Known | None, change: Callable[[Affine], Affine | None]) -> Known | None:
    """The value with each formula changed; None if there is none for one of them."""
    if value is None or isinstance(value, Affine):
        return None if value is None else change(value)
    reached = [change(one) for one in value.reached]
    return None if None in reached else replace(value, reached=tuple(one for one in reached if one is not None))


def _broadcast(value: Known | None, dims: int) -> Known | None:
    return None if value is None else value.over(dims)


def _expanded(call: _Call) -> Known | None:
    return _broadcast(call.value(0), call.dims)


def _repeated(call: _Call) -> Known | None:
    """Along dims on which nothing depends."""
    times = call.node.args[1]
    along = [dim for dim, count in enumerate(times) if not isinstance(count, int) or count != 1]

    def change(one: Affine) -> Affine | None:
        wide = one.over(call.dims)
        return None if any(wide.steps[dim] for dim in along) else wide

    return _along(call.value(0), change)


def _reshaped(call: _Call) -> Known | None:
    """Adds or drops dims of size 1."""
    kept, there = ([dim for dim, size in enumerate(shape) if not surely(size == 1)] for shape in (call.input().shape, call.result.shape))
    if len(kept) != len(there) or any(not surely(call.input().shape[a] == call.result.shape[b]) for a, b in zip(kept, there, strict=True)):
        return None
    of = dict(zip(there, kept, strict=True))
    return _along(call.value(0), lambda one: replace(one, steps=tuple(one.steps[of[dim]] if dim in of else 0 for dim in range(call.dims))))


def _permuted(order: Callable[[_Call], Sequence[int]]) -> Rule:
    def rule(call: _Call) -> Known | None:
        dims = [dim % call.dims for dim in order(call)]
        return _along(call.value(0), lambda one: replace(one, steps=tuple(one.steps[dim] for dim in dims)))

    return rule


def _swapped(call: _Call) -> Sequence[int]:
    dims = list(range(call.dims))
    a, b = (0, 1) if call.node.target is aten.t.default else (call.arg(1), call.arg(2))
    if call.dims > 1:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _sliced(call: _Call) -> Known | None:
    dim, start, step = call.arg(1, 0) % call.dims, call.arg(2, 0), call.arg(4, 1)
    start = _from_first(0 if start is None else start, call.input().shape[dim])
    if start is None or not isinstance(step, int):
        return None

    def change(one: Affine) -> Affine:
        return Affine(one.start + start * one.steps[dim], (*one.steps[:dim], one.steps[dim] * step, *one.steps[dim + 1 :]))

    return _along(call.value(0), change)


def _selected(call: _Call) -> Known | None:
    dim = call.arg(1) % (call.dims + 1)
    index = _from_first(call.arg(2), call.input().shape[dim])
    if index is None:
        return None
    return _along(call.value(0), lambda one: Affine(one.start + index * one.steps[dim], (*one.steps[:dim], *one.steps[dim + 1 :])))


def _from_first(place: Any, size: Whole) -> Whole | None:
    """A place counted from the first element; a slice from behind the end has no elements, about which anything is true."""
    if isinstance(place, int) and isinstance(size, int):
        return place if place >= 0 else max(place + size, 0)
    return place if isinstance(place, int | torch.SymInt) and surely(place >= 0) else None


def _joined(call: _Call) -> Known | None:
    """``cat`` of positions that continue each other."""
    dim = call.arg(1, 0) % call.dims
    nodes = [node for node in call.node.args[0] if not surely(node.meta["val"].numel() == 0)]
    pieces = [piece for piece in map(call.of, nodes) if piece is not None and len(piece.steps) == call.dims]
    if not nodes or len(pieces) < len(nodes):
        return None
    sizes = [node.meta["val"].shape[dim] for node in nodes]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    guide = next((i for i, size in enumerate(sizes) if not surely(size == 1)), 0)  # one element says nothing about the step
    step, steps = pieces[guide].steps[dim], pieces[guide].steps
    whole = Affine(pieces[guide].start - step * starts[guide], steps)
    for piece, size, start in zip(pieces, sizes, starts, strict=True):
        there = (*steps[:dim], 0, *steps[dim + 1 :]) if surely(size == 1) else steps
        if piece.steps != there or not surely(piece.start == whole.start + step * start):
            return None
    return whole


def _indexed(call: _Call) -> Known | None:
    """``value[i_0, i_1, ...]`` with an index for each dim, none of them negative."""
    value, nodes = call.value(0), call.node.args[1]
    if any(node is None or not is_whole(node.meta["val"].dtype) or node.meta["val"].dtype == torch.uint8 for node in nodes):
        return None

    def read(one: Affine) -> Affine | None:
        total = Affine(one.start, (0,) * call.dims)
        for step, node in zip(one.steps, nodes, strict=True):
            index = call.of(node)
            if step and (index is None or not surely(index.least(node.meta["val"].shape) >= 0)):
                return None
            total = total if index is None or not step else total.plus(index.over(call.dims), step)
        return total

    return _along(value, read) if len(nodes) == call.input().dim() else None


def _summed(call: _Call) -> Known | None:
    """``cumsum`` of one whole number: of zeros, where no sequence starts anew."""
    value = call.value(0)
    if not isinstance(value, Where) or value.reached or isinstance(value.yes, float) or not call.dims or call.node.kwargs:
        return None
    number, dim = int(value.yes), call.arg(1) % call.dims
    return Affine(number, tuple(number if d == dim else 0 for d in range(call.dims)))


_RULES: dict[Any, Rule] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.full.default: _filled(1),
    aten.full_like.default: _filled(1),
    aten.scalar_tensor.default: _filled(0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default), _always(1)),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), _always(0)),
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.mul.Tensor: _product,
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _compared(operator.ge, 0, 0)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _compared(operator.gt, 0, 1)),
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _compared(operator.le, 1, 0)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _compared(operator.lt, 1, 1)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equal(operator.eq)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equal(operator.ne)),
    **dict.fromkeys((aten.bitwise_and.Tensor, aten.logical_and.default), _and),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _not),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _chosen(0, 1, 2)),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _chosen(1, 2, 0)),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _copied),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default), _reshaped),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshaped),
    aten.permute.default: _permuted(lambda call: call.node.args[1]),
    **dict.fromkeys((aten.transpose.int, aten.t.default), _permuted(_swapped)),
    aten.expand.default: _expanded,
    aten.repeat.default: _repeated,
    aten.slice.Tensor: _sliced,
    aten.select.int: _selected,
    aten.cat.default: _joined,
    aten.index.Tensor: _indexed,
    aten.cumsum.default: _summed,
}
