"""Parts of a tensor at literal places: the dim that is cut stays whole, a slice that takes all of it is free."""

from __future__ import annotations

from typing import Any

from fxshard.call import Call
from fxshard.strategies.dims import moved, named
from fxshard.strategies.factors import MOVEMENT, Factors, factors, linear_groups, same
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register


def _shapes(call: Call) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (out,) = call.outputs
    assert out is not None
    return call.operands[0].shape, out.shape


def resized_dims(call: Call) -> Factors:
    """Slices, forward and backward: a dim whose size stays was taken whole and is free; zeros filled in are zeros on all ranks."""
    source, target = _shapes(call)
    free = [same(a, b) for a, b in zip(source, target, strict=True)]
    ins = [f"d{d}" if f else f"i{d}!" for d, f in enumerate(free)]
    outs = [f"d{d}" if f else f"o{d}!" for d, f in enumerate(free)]
    return moved(call, ins, outs)


def padded(call: Call) -> Factors:
    """Padding; a pad that crops on one side what it adds on the other keeps the size but moves everything."""
    (out,) = call.outputs
    assert out is not None
    pad, value = call.arg(1), call.arg(2, "value", 0)
    touched = {out.ndim - 1 - i // 2 for i, p in enumerate(pad) if not same(p, 0)}
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
    shape, src = call.operands[0].shape, call.operands[1].shape
    free = [same(a, b) for a, b in zip(shape, src, strict=True)]
    dims = [f"d{d}" if f else f"i{d}!" for d, f in enumerate(free)]
    source = [f"d{d}" if f else f"s{d}!" for d, f in enumerate(free)]
    return factors([dims, source], [dims], linear=linear_groups(call, [(0, 1)], MOVEMENT))


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


def unfold(call: Call) -> Factors:
    """Windows of a dim, as a last dim."""
    ndim = call.operands[0].ndim
    ins = named(ndim, [call.arg(1) % ndim])
    return moved(call, ins, [*(n if not n.endswith("!") else "windows!" for n in ins), "window!"])


def unfold_backward(call: Call) -> Factors:
    """Windows added up where they came from; linear."""
    dim = call.arg(2) % (call.operands[0].ndim - 1)
    outs = named(call.operands[0].ndim - 1, [dim])
    ins = [*("windows!" if d == dim else n for d, n in enumerate(outs)), "window!"]
    return factors([ins], [outs], linear=linear_groups(call, [(0,)]))


register(names("slice.Tensor slice_copy.Tensor"), resized_dims)
register(names("slice_backward"), resized_dims, sizes=1)
register(names("constant_pad_nd"), padded)
register(names("select.int select_copy.int"), selected)
register(names("select_backward"), select_backward, sizes=1)
register(names("slice_scatter"), slice_scatter)
register(names("select_scatter"), select_scatter)
register(names("diagonal diagonal_copy"), diagonal)
register(names("diagonal_backward"), diagonal_backward, sizes=1)
register(names("unfold"), unfold)
register(names("unfold_backward"), unfold_backward, sizes=1)
