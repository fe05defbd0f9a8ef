"""Slices, selections and diagonals at literal positions.

A dim that a slice takes whole can be sharded; one of which it takes every k-th element can be sharded in groups of k. Any other
part of a dim is on some ranks only, and its pieces on the ranks are not shards of the part: the dim then stays whole. A packed dim is
sharded in each of its parts, so a slice that is one of them is sharded too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.tensor import Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, LocalForm
from fxshard.strategies.engine.packed import PackedOption, Packs, by_factor
from fxshard.strategies.engine.registry import register, replaced
from fxshard.strategies.tensors.dims import named, rearranged
from fxshard.strategies.tensors.pointwise import aten_names
from fxshard.strategies.tensors.windows import is_tiling


def _shapes(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return call.operands[0].shape, call.output.shape


def first_taken(start: int | None, size: int) -> int:
    """Index at which a slice starts: a negative start counts from the end, and is clamped to the first element."""
    start = start or 0
    return min(start, size) if start >= 0 else max(start + size, 0)


def _every_kth(call: Call, dim: int, whole: Any, part: Any) -> int:
    """The step k of a slice that takes every k-th element of a dim (part k); 0 for any other slice. ``dim``: position of that argument."""
    dim, start, step = call.arg(dim, "dim", 0), call.arg(dim + 1, "start"), call.arg(dim + 3, "step", 1)
    if not all(isinstance(v, int) for v in (whole, part, step, start or 0)) or step < 2 or part * step != whole:
        return 0
    return step if first_taken(start, whole) < step else 0


def _sliced(call: Call, whole: tuple[Any, ...], part: tuple[Any, ...], dim: int) -> tuple[list[Name], list[Name], dict[str, Any]]:
    """(names of the whole tensor's dims, names of the part's dims, sizes); ``dim``: position of that argument.

    Dims of unchanged size can be sharded, a dim with every k-th element taken in groups of k; other sliced dims stay whole.
    """
    along = call.arg(dim, "dim", 0) % len(whole)
    step = _every_kth(call, dim, whole[along], part[along])
    long: list[Name] = [f"d{d}" if known_equal(a, b) else f"i{d}!" for d, (a, b) in enumerate(zip(whole, part, strict=True))]
    short: list[Name] = [f"d{d}" if known_equal(a, b) else f"o{d}!" for d, (a, b) in enumerate(zip(whole, part, strict=True))]
    if step:
        long[along], short[along] = ("s", "k!"), "s"
    return long, short, {"k": step} if step else {}


def sliced(call: Call) -> Factors:
    """A slice of one dim."""
    long, short, sizes = _sliced(call, *_shapes(call), 1)
    return rearranged(call, long, short, sizes=sizes)


def slice_backward(call: Call) -> Factors:
    """Zeros with the gradient in a slice; all reductions map zeros to zero, so they pass."""
    part, whole = _shapes(call)
    long, short, sizes = _sliced(call, whole, part, 2)
    return rearranged(call, short, long, sizes=sizes)


def part_taken(call: Call, parts: Sequence[int], size: int, first: int) -> int | None:
    """Index of the part of a packed dim that a slice takes, None if it takes anything else. ``first``: position of its start."""
    start, end, step = call.arg(first, "start"), call.arg(first + 1, "end"), call.arg(first + 2, "step", 1)
    if step != 1 or not all(isinstance(v, int | None) for v in (start, end)):
        return None
    begin, stop = first_taken(start, size), size if end is None else first_taken(end, size)
    return next((k for k, (a, b) in enumerate(ends_of(parts)) if (a, b) == (begin, stop)), None)


def ends_of(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of each part of a dim."""
    return itertools.pairwise(itertools.accumulate(parts, initial=0))


def packed_slice(call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any]) -> Iterator[PackedOption]:
    """A slice that is a part of a packed dim is sharded as usual."""
    yield from by_factor(call, packs, rule, sizes)
    shape = call.operands[0].shape
    along = call.arg(1, "dim", 0) % max(len(shape), 1)
    parts = dict(packs[0]).get(along, ())
    taken = part_taken(call, parts, shape[along], 2) if parts else None
    if taken is not None:
        yield PackedOption((PackedShard(along, parts),), (Shard(along),), parts)


def packed_slice_backward(call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any]) -> Iterator[PackedOption]:
    """The gradient of a slice that is a part of a packed dim: zeros in the other parts."""
    yield from by_factor(call, packs, rule, sizes)
    shape = call.output.shape
    along = call.arg(2, "dim", 0) % max(len(shape), 1)
    parts = dict(packs[-1]).get(along, ())
    if parts and part_taken(call, parts, shape[along], 3) is not None:
        yield PackedOption((Shard(along),), (PackedShard(along, parts),), parts)


TO_THE_END = 2**63 - 1
"""The end of a slice that torch writes for ``x[1:]``."""


def local_slice(end: int, sizes: int | None = None) -> LocalForm:
    """A slice of a sharded dim runs to the end of the shard. ``end``: position of that argument; ``sizes``: that of the global shape."""

    def local(ctx: LocalContext) -> Any:
        values: dict[int, Any] = {} if sizes is None else {sizes: list(ctx.output_shape())}
        shape = ctx.call.operands[0].shape if sizes is None else ctx.call.arg(sizes)
        along = ctx.call.arg(end - 2, "dim", 0) % max(len(shape), 1)
        whole = ctx.inputs[0] if sizes is None else ctx.outputs[0]
        packed = whole.packed_on(along)
        taken = None if packed is None else part_taken(ctx.call, packed[1].parts, shape[along], end - 1)
        if taken is not None:
            first, last = list(ends_of(ctx.part_lengths(whole, along)))[taken]
            values |= {end - 1: first, end: last}
        elif packed is not None or ctx.inputs[0].axes_on(along):
            values |= {end - 1: first_taken(ctx.call.arg(end - 1), shape[along]), end: TO_THE_END}
        return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)

    return local


def local_slice_scatter(ctx: LocalContext) -> Any:
    """A slice to the end names it by the size of the dim: Inductor cannot compare a size with 2**63 - 1 in this operator."""
    along = ctx.call.arg(2, "dim", 0) % ctx.call.operands[0].ndim
    if ctx.call.arg(4, "end", None) in (None, TO_THE_END) or ctx.inputs[0].axes_on(along):
        start = ctx.call.arg(3, "start", None) or 0
        here = first_taken(start, ctx.call.operands[0].shape[along]) if ctx.inputs[0].axes_on(along) else start
        return ctx.emit(ctx.target, ctx.args[0], ctx.args[1], along, here, ctx.input_shape(0)[along], ctx.call.arg(5, "step", 1))
    return ctx.emit(ctx.target, *ctx.args, **ctx.kwargs)


def padded(call: Call) -> Factors:
    """Padding; padded dims stay whole, also if cropping on the other side keeps their size."""
    ndim, pad, value = call.output.ndim, call.arg(1), call.arg(2, "value", 0)
    touched = {ndim - 1 - i // 2 for i, p in enumerate(pad) if not known_equal(p, 0)}
    ins, outs = named(ndim, touched), [f"o{d}!" if d in touched else f"d{d}" for d in range(ndim)]
    return factors([ins], [outs], linear=linear_groups(call, [(0,)], MOVEMENT if value == 0 else ("avg", "max", "min")))


def _without(ndim: int, gone: Sequence[int]) -> tuple[list[str], list[str]]:
    """Names of all dims, with the dims ``gone`` whole, and of the others."""
    dims = named(ndim, gone)
    return dims, [n for d, n in enumerate(dims) if d not in gone]


def _diagonal(call: Call, ndim: int, first: int, default: tuple[int, int] = (0, 1)) -> tuple[list[str], list[str]]:
    """Names of all dims, and those with two dims replaced by their diagonal. ``first``: position of the argument that is one of them."""
    dims, others = _without(ndim, [call.arg(first + i, f"dim{i + 1}", default[i]) % ndim for i in range(2)])
    return dims, [*others, "diagonal!"]


def selected(call: Call) -> Factors:
    """One index of a dim."""
    ndim = call.operands[0].ndim
    return rearranged(call, *_without(ndim, [call.arg(1) % ndim]))


def select_backward(call: Call) -> Factors:
    """Zeros with the gradient at one index of a dim."""
    ndim = call.output.ndim
    outs, ins = _without(ndim, [call.arg(2) % ndim])
    return rearranged(call, ins, outs)


def slice_scatter(call: Call) -> Factors:
    """x with a slice replaced by src."""
    long, short, sizes = _sliced(call, call.operands[0].shape, call.operands[1].shape, 2)
    return factors([long, short], [long], sizes=sizes, linear=linear_groups(call, [(0, 1)], MOVEMENT))


def select_scatter(call: Call) -> Factors:
    """x with one index of a dim replaced by src."""
    ndim = call.operands[0].ndim
    dims, source = _without(ndim, [call.arg(2) % ndim])
    return factors([dims, source], [dims], linear=linear_groups(call, [(0, 1)], MOVEMENT))


def diagonal(call: Call) -> Factors:
    """The diagonal of two dims, as a last dim."""
    return rearranged(call, *_diagonal(call, call.operands[0].ndim, 2))


def diagonal_backward(call: Call) -> Factors:
    """Zeros with the gradient on the diagonal of two dims."""
    outs, ins = _diagonal(call, call.output.ndim, 3)
    return rearranged(call, ins, outs)


def _windows(call: Call, size: Any, dim: int) -> tuple[Name, Name, str]:
    """Names of a dim, of its windows, and of a window; windows that tile the dim make it (windows window). ``dim``: position of that
    argument."""
    window, step = call.arg(dim + 1), call.arg(dim + 2)
    if is_tiling(size, size // window, window, step):
        return ("windows", "window!"), "windows", "window!"
    return "d!", "windows!", "window!"


def diag_embed(call: Call) -> Factors:
    """The last dim as the diagonal of two new ones."""
    outs, ins = _diagonal(call, call.output.ndim, 2, (-2, -1))
    return rearranged(call, ins, outs)


def diagonal_scatter(call: Call) -> Factors:
    """x with the diagonal of two dims replaced by src."""
    dims, source = _diagonal(call, call.operands[0].ndim, 3)
    return factors([dims, source], [dims], linear=linear_groups(call, [(0, 1)], MOVEMENT))


def narrowed(call: Call) -> Factors:
    """A contiguous part of a dim, which stays whole unless the part is all of it."""
    whole, part = _shapes(call)
    free = [known_equal(a, b) for a, b in zip(whole, part, strict=True)]
    ins, outs = ([f"d{d}" if f else f"{prefix}{d}!" for d, f in enumerate(free)] for prefix in "io")
    return rearranged(call, ins, outs)


def local_narrow(ctx: LocalContext) -> Any:
    dim = ctx.call.arg(1) % ctx.call.operands[0].ndim
    return ctx.emit(ctx.target, *replaced(ctx.args, {3: ctx.output_shape()[dim]}), **ctx.kwargs)


def unfold(call: Call) -> Factors:
    """Windows of a dim, as a last dim."""
    shape = call.operands[0].shape
    if not shape:
        return rearranged(call, [], ["window!"])
    dim = call.arg(1) % len(shape)
    whole, windows, window = _windows(call, shape[dim], 1)
    ins: list[Name] = list(named(len(shape)))
    outs = [*ins, window]
    ins[dim], outs[dim] = whole, windows
    return rearranged(call, ins, outs)


def unfold_backward(call: Call) -> Factors:
    """Adds windows up at their positions in the dim; linear."""
    _, shape = _shapes(call)
    if not shape:
        return factors([["window!"]], [[]], linear=linear_groups(call, [(0,)]))
    dim = call.arg(2) % len(shape)
    whole, windows, window = _windows(call, shape[dim], 2)
    outs: list[Name] = list(named(len(shape)))
    ins = [*outs, window]
    ins[dim], outs[dim] = windows, whole
    return factors([ins], [outs], linear=linear_groups(call, [(0,)]))


register(aten_names("slice.Tensor slice_copy.Tensor"), sliced, local=local_slice(3), packed=packed_slice)
register(aten_names("slice_backward"), slice_backward, local=local_slice(4, sizes=1), packed=packed_slice_backward)
register(aten_names("constant_pad_nd"), padded)
register(aten_names("select.int select_copy.int"), selected)
register(aten_names("select_backward"), select_backward, size_argument=1)
register(aten_names("slice_scatter"), slice_scatter, local=local_slice_scatter)
register(aten_names("select_scatter"), select_scatter)
register(aten_names("diagonal diagonal_copy"), diagonal)
register(aten_names("diagonal_backward"), diagonal_backward, size_argument=1)
register(aten_names("diag_embed"), diag_embed)
register(aten_names("diagonal_scatter"), diagonal_scatter)
register(aten_names("narrow_copy"), narrowed, local=local_narrow)
register(aten_names("unfold unfold_copy"), unfold)
register(aten_names("unfold_backward"), unfold_backward, size_argument=1)
