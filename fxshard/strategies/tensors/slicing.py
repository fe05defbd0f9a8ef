"""Parts of a tensor at literal places.

A slice that takes all of a dim leaves it free, one that takes one of every k elements leaves its groups of k free. Any
other part of a dim lies on some ranks only, whose shards would be no plain shards of the part: there the dim is whole.
"""

from __future__ import annotations

from typing import Any

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, LocalForm
from fxshard.strategies.engine.registry import register, replaced
from fxshard.strategies.tensors.dims import moved, named
from fxshard.strategies.tensors.pointwise import names
from fxshard.strategies.tensors.windows import side_by_side


def _shapes(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (out,) = call.outputs
    assert out is not None
    return call.operands[0].shape, out.shape


def first_taken(start: int | None, size: int) -> int:
    """Where a slice begins: a negative start counts from the end, and stops at the first element."""
    start = start or 0
    return min(start, size) if start >= 0 else max(start + size, 0)


def _strided(call: Call, dim: int, whole: Any, part: Any) -> int:
    """The step k of a slice that takes one of every k elements of ``dim``, which is (part k); 0 for any other slice."""
    dim, start, step = call.arg(dim, "dim", 0), call.arg(dim + 1, "start"), call.arg(dim + 3, "step", 1)
    if not all(isinstance(v, int) for v in (whole, part, step, start or 0)) or step < 2 or part * step != whole:
        return 0
    return step if first_taken(start, whole) < step else 0


def _sliced(call: Call, whole: tuple[Any, ...], part: tuple[Any, ...], dim: int) -> tuple[list[Name], list[Name], dict[str, Any]]:
    """Names of the whole and of the part; ``dim``: position of that argument.

    A dim whose size stays was taken whole. A dim of which one in k is taken is cut between groups of k; any other slice
    lies on some of the ranks only, so its dim stays whole.
    """
    along = call.arg(dim, "dim", 0) % len(whole)
    step = _strided(call, dim, whole[along], part[along])
    long: list[Name] = [f"d{d}" if known_equal(a, b) else f"i{d}!" for d, (a, b) in enumerate(zip(whole, part, strict=True))]
    short: list[Name] = [f"d{d}" if known_equal(a, b) else f"o{d}!" for d, (a, b) in enumerate(zip(whole, part, strict=True))]
    if step:
        long[along], short[along] = ("s", "k!"), "s"
    return long, short, {"k": step} if step else {}


def sliced(call: Call) -> Factors:
    """One slice of a dim."""
    long, short, sizes = _sliced(call, *_shapes(call), 1)
    return moved(call, long, short, sizes=sizes)


def slice_backward(call: Call) -> Factors:
    """Zeros with the gradient at a slice: zeros filled in are zeros on all ranks."""
    part, whole = _shapes(call)
    long, short, sizes = _sliced(call, whole, part, 2)
    return moved(call, short, long, sizes=sizes)


def to_the_end(end: int, sizes: int | None = None) -> LocalForm:
    """The slice of a shard goes to the end of the shard, if the dim is cut; ``sizes``: position of the whole's shape."""

    def local(ctx: LocalContext) -> Any:
        values: dict[int, Any] = {} if sizes is None else {sizes: list(ctx.output_shape())}
        shape = ctx.call.operands[0].shape if sizes is None else ctx.call.arg(sizes)
        along = ctx.call.arg(end - 2, "dim", 0) % max(len(shape), 1)
        if ctx.inputs[0].axes_on(along):
            values |= {end - 1: first_taken(ctx.call.arg(end - 1), shape[along]), end: 2**63 - 1}
        return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)

    return local


def padded(call: Call) -> Factors:
    """Padding; a pad that crops on one side what it adds on the other keeps the size but moves everything."""
    (out,) = call.outputs
    assert out is not None
    pad, value = call.arg(1), call.arg(2, "value", 0)
    touched = {out.ndim - 1 - i // 2 for i, p in enumerate(pad) if not known_equal(p, 0)}
    ins, outs = named(out.ndim, touched, "d"), [f"o{d}!" if d in touched else f"d{d}" for d in range(out.ndim)]
    return factors([ins], [outs], linear=linear_groups(call, [(0,)], MOVEMENT if value == 0 else ("avg", "max", "min")))


def selected(call: Call) -> Factors:
    """One index of a dim."""
    ndim = call.operands[0].ndim
    dim = call.arg(1) % ndim
    ins = named(ndim, [dim])
    return moved(call, ins, [n for d, n in enumerate(ins) if d != dim])


def select_backward(call: Call) -> Factors:
    """Zeros with the gradient at one index of a dim."""
    _, target = _shapes(call)
    dim = call.arg(2) % len(target)
    outs = named(len(target), [dim])
    return moved(call, [n for d, n in enumerate(outs) if d != dim], outs)


def slice_scatter(call: Call) -> Factors:
    """x with a slice replaced by src."""
    long, short, sizes = _sliced(call, call.operands[0].shape, call.operands[1].shape, 2)
    return factors([long, short], [long], sizes=sizes, linear=linear_groups(call, [(0, 1)], MOVEMENT))


def select_scatter(call: Call) -> Factors:
    """x with one index of a dim replaced by src."""
    ndim = call.operands[0].ndim
    dim = call.arg(2) % ndim
    dims = named(ndim, [dim])
    return factors([dims, [n for d, n in enumerate(dims) if d != dim]], [dims], linear=linear_groups(call, [(0, 1)], MOVEMENT))


def diagonal(call: Call) -> Factors:
    """The diagonal of two dims, as a last dim."""
    ndim = call.operands[0].ndim
    a, b = call.arg(2, "dim1", 0) % ndim, call.arg(3, "dim2", 1) % ndim
    ins = named(ndim, [a, b])
    return moved(call, ins, [*(n for d, n in enumerate(ins) if d not in (a, b)), "diagonal!"])


def diagonal_backward(call: Call) -> Factors:
    """Zeros with the gradient on the diagonal of two dims."""
    _, target = _shapes(call)
    a, b = call.arg(3, default=0) % len(target), call.arg(4, default=1) % len(target)
    outs = named(len(target), [a, b])
    return moved(call, [*(n for d, n in enumerate(outs) if d not in (a, b)), "diagonal!"], outs)


def _windows(call: Call, size: Any, dim: int) -> tuple[Name, Name, str]:
    """Names of a dim, of its windows and of a window; ``dim``: position of that argument. Side by side they make (windows window)."""
    window, step = call.arg(dim + 1), call.arg(dim + 2)
    if side_by_side(size, size // window, window, step):
        return ("windows", "window!"), "windows", "window!"
    return "d!", "windows!", "window!"


def diag_embed(call: Call) -> Factors:
    """The last dim as the diagonal of two new ones."""
    (out,) = call.outputs
    assert out is not None
    a, b = (d % out.ndim for d in (call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)))
    outs = named(out.ndim, [a, b])
    return moved(call, [*(n for d, n in enumerate(outs) if d not in (a, b)), "diagonal!"], outs)


def diagonal_scatter(call: Call) -> Factors:
    """x with the diagonal of two dims replaced by src."""
    ndim = call.operands[0].ndim
    a, b = call.arg(3, "dim1", 0) % ndim, call.arg(4, "dim2", 1) % ndim
    dims = named(ndim, [a, b])
    source = [*(n for d, n in enumerate(dims) if d not in (a, b)), "diagonal!"]
    return factors([dims, source], [dims], linear=linear_groups(call, [(0, 1)], MOVEMENT))


def narrowed(call: Call) -> Factors:
    """A part of a dim, which stays whole unless the part is all of it."""
    whole, part = _shapes(call)
    free = [known_equal(a, b) for a, b in zip(whole, part, strict=True)]
    ins, outs = ([f"d{d}" if f else f"{prefix}{d}!" for d, f in enumerate(free)] for prefix in "io")
    return moved(call, ins, outs)


def local_narrow(ctx: LocalContext) -> Any:
    dim = ctx.call.arg(1) % ctx.call.operands[0].ndim
    return ctx.emit(ctx.target, *replaced(ctx.args, {3: ctx.output_shape()[dim]}), **ctx.kwargs)


def unfold(call: Call) -> Factors:
    """Windows of a dim, as a last dim."""
    shape = call.operands[0].shape
    if not shape:
        return moved(call, [], ["window!"])
    dim = call.arg(1) % len(shape)
    whole, windows, window = _windows(call, shape[dim], 1)
    ins: list[Name] = list(named(len(shape)))
    outs = [*ins, window]
    ins[dim], outs[dim] = whole, windows
    return moved(call, ins, outs)


def unfold_backward(call: Call) -> Factors:
    """Windows added up where they came from; linear."""
    _, shape = _shapes(call)
    if not shape:
        return factors([["window!"]], [[]], linear=linear_groups(call, [(0,)]))
    dim = call.arg(2) % len(shape)
    whole, windows, window = _windows(call, shape[dim], 2)
    outs: list[Name] = list(named(len(shape)))
    ins = [*outs, window]
    ins[dim], outs[dim] = windows, whole
    return factors([ins], [outs], linear=linear_groups(call, [(0,)]))


register(names("slice.Tensor slice_copy.Tensor"), sliced, local=to_the_end(3))
register(names("slice_backward"), slice_backward, local=to_the_end(4, sizes=1))
register(names("constant_pad_nd"), padded)
register(names("select.int select_copy.int"), selected)
register(names("select_backward"), select_backward, sizes=1)
register(names("slice_scatter"), slice_scatter, local=to_the_end(4))
register(names("select_scatter"), select_scatter)
register(names("diagonal diagonal_copy"), diagonal)
register(names("diagonal_backward"), diagonal_backward, sizes=1)
register(names("diag_embed"), diag_embed)
register(names("diagonal_scatter"), diagonal_scatter)
register(names("narrow_copy"), narrowed, local=local_narrow)
register(names("unfold unfold_copy"), unfold)
register(names("unfold_backward"), unfold_backward, sizes=1)
