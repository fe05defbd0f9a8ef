"""Pooling and nearest-neighbour resampling: space may be cut where windows lie side by side, see ``windows``.

A mean over one window that spans a dim is a pending sum: each shard's mean weighs as much as it has elements of the
window. Maxima tell where they stand in the whole plane, so shards move their places by their own offset.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxshard.graph.call import Call, TensorMeta
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.factors import Factors, Name, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext, on_contiguous
from fxshard.strategies.engine.registry import register, replaced
from fxshard.strategies.tensors.pointwise import names
from fxshard.strategies.tensors.windows import OVERLAP, aten, each, moved_index, side_by_side, space, spanning

Fit = tuple[bool, bool]
"""Of one dim of space: whether its windows lie side by side, whether one spans it."""


@dataclass(frozen=True)
class Images:
    """The operands and outputs that have the larger plane, and those that have the smaller one, by index."""

    big: tuple[int, ...]
    small: tuple[int, ...]
    big_out: tuple[int, ...] = ()
    small_out: tuple[int, ...] = ()


def sizes(call: Call, images: Images, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Sizes of the two planes."""

    def plane(ins: tuple[int, ...], outs: tuple[int, ...]) -> Sequence[Any]:
        meta = call.operands[ins[0]] if ins else call.outputs[outs[0]]
        assert meta is not None
        return meta.shape[meta.ndim - count :]

    return plane(images.big, images.big_out), plane(images.small, images.small_out)


def pooled(call: Call, images: Images, count: int, fits: Sequence[Fit]) -> Factors:
    """Both planes over ``count`` dims of space; all dims before them are free."""
    found = [space(d, *fit) for d, fit in enumerate(fits)]
    wide, narrow = [names[0] for names in found], [names[2] for names in found]

    def of(meta: TensorMeta, big: bool) -> list[Name]:
        return [*(f"d{d}" for d in range(meta.ndim - count)), *(wide if big else narrow)]

    ins = [of(meta, i in images.big) for i, meta in enumerate(call.operands)]
    outs = [None if meta is None else of(meta, o in images.big_out) for o, meta in enumerate(call.outputs)]
    note = "" if all(map(any, fits)) else OVERLAP
    rounds = not all(is_inexact(o.dtype) for o in call.outputs if o is not None)
    linear = () if rounds or len(call.outputs) > 1 else linear_groups(call, [(0,)])
    return factors(ins, outs, linear=linear, note=note)


def averages(count: int, adaptive: bool, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """Rule and local form of a mean over windows: (x, kernel, stride, padding, ...) or (x, output size), or the gradient.

    Means of whole numbers are rounded, so they do not add up.
    """
    images = Images((1,), (0,), big_out=(0,)) if backward else Images((0,), (), small_out=(0,))
    kernel = int(backward) + 1

    def fits(call: Call) -> list[Fit]:
        big, small = sizes(call, images, count)
        found = _adaptive(big, small) if adaptive else _fits(call, kernel, big, small)
        return found if is_inexact(call.operands[0].dtype) else [(tiles and not spans, False) for tiles, spans in found]

    def rule(call: Call) -> Factors:
        return pooled(call, images, count, fits(call))

    def local(ctx: LocalContext) -> Any:
        x = 1 if backward else 0
        whole, part = ctx.call.operands[x].shape[-count:], ctx.input_shape(x)[-count:]
        cut = [fit[1] and a != b for fit, a, b in zip(fits(ctx.call), whole, part, strict=True)]
        args = ctx.args
        if adaptive and not backward:
            args = replaced(args, {1: list(ctx.output_shape()[-count:])})
        elif not adaptive:
            given = each(ctx.call.arg(kernel), count)
            args = replaced(args, {kernel: [p if c else k for p, c, k in zip(part, cut, given, strict=True)]})
        result = ctx.emit(ctx.target, *args, **ctx.kwargs)
        if not any(cut) or (not adaptive and ctx.call.arg(kernel + 5, "divisor_override") is not None):
            return result
        scale = 1.0
        for c, a, b in zip(cut, part, whole, strict=True):
            scale *= a / b if c else 1.0
        return ctx.emit(aten.mul.Scalar, result, scale)

    return rule, local


def maxima(count: int, adaptive: bool, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """The same for maxima and their places; (grad, x, ..., places) -> dx. One window leaves no plain maximum: it has a place."""
    images = Images((1,), (0, 2), big_out=(0,)) if backward else Images((0,), (), small_out=(0, 1))
    kernel = int(backward) + 1

    def fits(call: Call) -> list[Fit]:
        big, small = sizes(call, images, count)
        found = _adaptive(big, small) if adaptive else _fits(call, kernel, big, small, dilated=True)
        return [(tiles and not known_equal(s, 1), False) for (tiles, _), s in zip(found, small, strict=True)]

    def rule(call: Call) -> Factors:
        return pooled(call, images, count, fits(call))

    def local(ctx: LocalContext) -> Any:
        x = 1 if backward else 0
        meta = ctx.call.operands[x]
        whole, part = meta.shape[-count:], ctx.input_shape(x)[-count:]
        offsets = [ctx.input_offset(x, d) for d in range(meta.ndim - count, meta.ndim)]
        moved = whole != part
        if backward:
            places = moved_index(ctx, ctx.args[-1], whole, part, offsets, -1) if moved else ctx.args[-1]
            return ctx.emit(ctx.target, *ctx.args[:-1], places, **ctx.kwargs)
        args = replaced(ctx.args, {1: list(ctx.output_shape()[-count:])}) if adaptive else ctx.args
        result = ctx.emit(ctx.target, *args, **ctx.kwargs)
        out, places = (ctx.emit(operator.getitem, result, i) for i in (0, 1))
        return out, moved_index(ctx, places, part, whole, offsets, 1) if moved else places

    return rule, on_contiguous(local) if backward else local


def _fits(call: Call, kernel: int, big: Sequence[Any], small: Sequence[Any], dilated: bool = False) -> list[Fit]:
    count = len(big)
    size = each(call.arg(kernel), count)
    stride = each(call.arg(kernel + 1, "stride") or size, count)
    padding = each(call.arg(kernel + 2, "padding", 0), count)
    dilation = each(call.arg(kernel + 3, "dilation", 1) if dilated else 1, count)
    rows = zip(big, small, size, stride, padding, dilation, strict=True)
    return [(side_by_side(b, s, k, st, p, d), spanning(b, s, k, p, d)) for b, s, k, st, p, d in rows]


def _adaptive(big: Sequence[Any], small: Sequence[Any]) -> list[Fit]:
    """The windows of an adaptive pool lie side by side where its output size divides the input's."""
    return [(known_equal(b % s, 0) if s != 0 else False, known_equal(s, 1)) for b, s in zip(big, small, strict=True)]


def nearest(count: int, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """Resampling by whole factors repeats each element: out = (s k); (x, size, scales...) and (grad, size, input size, ...)."""
    images = Images((0,), (), small_out=(0,)) if backward else Images((), (0,), big_out=(0,))

    def rule(call: Call) -> Factors:
        centre = 0.5 if "exact" in call.op else 0.0
        scales = call.arg(2) if call.op.endswith(".vec") else call.args[2 + backward :]
        fits = []
        for d, (b, s) in enumerate(zip(*sizes(call, images, count), strict=True)):
            single = known_equal(s, 1) and call.arg(1) is not None
            scale = scales[d] if scales and d < len(scales) else None
            fits.append((not single and repeats(b, s, centre, scale), single))
        return pooled(call, images, count, fits)

    def local(ctx: LocalContext) -> Any:
        plane = list((ctx.input_shape(0) if backward else ctx.output_shape())[-count:])
        values: dict[int, Any] = {} if ctx.call.arg(1) is None else {1: plane}
        if backward:
            values[2] = list(ctx.output_shape())
        return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)

    return rule, local


def repeats(big: Any, small: Any, centre: float, scale: float | None) -> bool:
    """Whether output i is input i // k, in the float32 numbers in which torch computes it; a scale that is given must be k too."""
    if not (isinstance(big, int) and isinstance(small, int)) or small < 2 or big % small:
        return False
    factor = big // small
    if scale is not None and scale != factor:
        return False
    at = (np.arange(big) + centre).astype(np.float32) * np.float32(1 / factor)
    return bool((at.astype(np.int64) == np.arange(big) // factor).all())


def _register(ops: str, form: tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]) -> None:
    register(names(ops), form[0], local=form[1])


for _n in (1, 2, 3):
    _register(f"avg_pool{_n}d", averages(_n, False, False))
    _register(f"upsample_nearest{_n}d upsample_nearest{_n}d.vec", nearest(_n, False))
    _register(f"_upsample_nearest_exact{_n}d _upsample_nearest_exact{_n}d.vec", nearest(_n, False))
    _register(f"upsample_nearest{_n}d_backward _upsample_nearest_exact{_n}d_backward", nearest(_n, True))
for _n in (2, 3):
    _register(f"avg_pool{_n}d_backward", averages(_n, False, True))
    _register(f"_adaptive_avg_pool{_n}d", averages(_n, True, False))
    _register(f"_adaptive_avg_pool{_n}d_backward", averages(_n, True, True))
    _register(f"max_pool{_n}d_with_indices", maxima(_n, False, False))
    _register(f"max_pool{_n}d_with_indices_backward", maxima(_n, False, True))
    _register(f"adaptive_max_pool{_n}d", maxima(_n, True, False))
    _register(f"adaptive_max_pool{_n}d_backward", maxima(_n, True, True))
_register("adaptive_avg_pool1d", averages(1, True, False))
_register("adaptive_max_pool1d", maxima(1, True, False))
