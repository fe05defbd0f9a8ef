"""Pooling and nearest-neighbour resampling: spatial dims can be sharded if windows tile them, see ``windows``.

A mean over one window that spans a dim becomes a pending sum: each shard's mean is weighted with its part of the window's
elements. Max pooling returns positions in the whole plane, so shards shift theirs by their offset.
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
from fxshard.strategies.tensors.pointwise import aten_names
from fxshard.strategies.tensors.windows import OVERLAP, aten, is_single_window, is_tiling, per_dim, shifted_index, space_names

Fit = tuple[bool, bool]
"""For one spatial dim: whether windows tile it, whether one window spans it."""


@dataclass(frozen=True)
class Images:
    """Indices of the operands and outputs with the larger plane (``big``) and with the smaller one (``small``)."""

    big: tuple[int, ...]
    small: tuple[int, ...]
    big_out: tuple[int, ...] = ()
    small_out: tuple[int, ...] = ()


def plane_sizes(call: Call, images: Images, count: int) -> tuple[Sequence[Any], Sequence[Any]]:
    """Sizes of the two planes."""

    def plane(ins: tuple[int, ...], outs: tuple[int, ...]) -> Sequence[Any]:
        meta = call.operands[ins[0]] if ins else call.outputs[outs[0]]
        assert meta is not None
        return meta.shape[meta.ndim - count :]

    return plane(images.big, images.big_out), plane(images.small, images.small_out)


def pooling_factors(call: Call, images: Images, count: int, fits: Sequence[Fit]) -> Factors:
    """Factors of both planes, over ``count`` spatial dims; all dims before them can be sharded."""
    found = [space_names(d, *fit) for d, fit in enumerate(fits)]
    wide, narrow = [names[0] for names in found], [names[2] for names in found]

    def of(meta: TensorMeta, big: bool) -> list[Name]:
        return [*(f"d{d}" for d in range(meta.ndim - count)), *(wide if big else narrow)]

    ins = [of(meta, i in images.big) for i, meta in enumerate(call.operands)]
    outs = [None if meta is None else of(meta, o in images.big_out) for o, meta in enumerate(call.outputs)]
    note = "" if all(map(any, fits)) else OVERLAP
    rounds = not all(is_inexact(o.dtype) for o in call.outputs if o is not None)
    linear = () if rounds or len(call.outputs) > 1 else linear_groups(call, [(0,)])
    return factors(ins, outs, linear=linear, note=note)


def avg_pool(count: int, adaptive: bool, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """Rule and local form of average pooling: (x, kernel, stride, padding, ...) or (x, output size), or the gradient.

    Averages of integers are rounded, so no pending sums pass and no window is split.
    """
    images = Images((1,), (0,), big_out=(0,)) if backward else Images((0,), (), small_out=(0,))
    kernel = int(backward) + 1

    def fits(call: Call) -> list[Fit]:
        big, small = plane_sizes(call, images, count)
        found = _adaptive_fits(big, small) if adaptive else _window_fits(call, kernel, big, small)
        return found if is_inexact(call.operands[0].dtype) else [(tiles and not spans, False) for tiles, spans in found]

    def rule(call: Call) -> Factors:
        return pooling_factors(call, images, count, fits(call))

    def local(ctx: LocalContext) -> Any:
        x = 1 if backward else 0
        whole, part = ctx.call.operands[x].shape[-count:], ctx.input_shape(x)[-count:]
        cut = [fit[1] and a != b for fit, a, b in zip(fits(ctx.call), whole, part, strict=True)]
        args = ctx.args
        if adaptive and not backward:
            args = replaced(args, {1: list(ctx.output_shape()[-count:])})
        elif not adaptive:
            given = per_dim(ctx.call.arg(kernel), count)
            args = replaced(args, {kernel: [p if c else k for p, c, k in zip(part, cut, given, strict=True)]})
        result = ctx.emit(ctx.target, *args, **ctx.kwargs)
        if not any(cut) or (not adaptive and ctx.call.arg(kernel + 5, "divisor_override") is not None):
            return result
        scale = 1.0
        for c, a, b in zip(cut, part, whole, strict=True):
            scale *= a / b if c else 1.0
        return ctx.emit(aten.mul.Scalar, result, scale)

    return rule, local


def max_pool(count: int, adaptive: bool, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """Rule and local form of max pooling with positions; (grad, x, ..., positions) -> dx. A single window stays whole, because positions
    cannot be pending."""
    images = Images((1,), (0, 2), big_out=(0,)) if backward else Images((0,), (), small_out=(0, 1))
    kernel = int(backward) + 1

    def fits(call: Call) -> list[Fit]:
        big, small = plane_sizes(call, images, count)
        found = _adaptive_fits(big, small) if adaptive else _window_fits(call, kernel, big, small, dilated=True)
        return [(tiles and not known_equal(s, 1), False) for (tiles, _), s in zip(found, small, strict=True)]

    def rule(call: Call) -> Factors:
        return pooling_factors(call, images, count, fits(call))

    def local(ctx: LocalContext) -> Any:
        x = 1 if backward else 0
        meta = ctx.call.operands[x]
        whole, part = meta.shape[-count:], ctx.input_shape(x)[-count:]
        offsets = [ctx.input_offset(x, d) for d in range(meta.ndim - count, meta.ndim)]
        moved = whole != part
        if backward:
            places = shifted_index(ctx, ctx.args[-1], whole, part, offsets, -1) if moved else ctx.args[-1]
            return ctx.emit(ctx.target, *ctx.args[:-1], places, **ctx.kwargs)
        args = replaced(ctx.args, {1: list(ctx.output_shape()[-count:])}) if adaptive else ctx.args
        result = ctx.emit(ctx.target, *args, **ctx.kwargs)
        out, places = (ctx.emit(operator.getitem, result, i) for i in (0, 1))
        return out, shifted_index(ctx, places, part, whole, offsets, 1) if moved else places

    return rule, on_contiguous(local) if backward else local


def _window_fits(call: Call, kernel: int, big: Sequence[Any], small: Sequence[Any], dilated: bool = False) -> list[Fit]:
    count = len(big)
    size = per_dim(call.arg(kernel), count)
    stride = per_dim(call.arg(kernel + 1, "stride") or size, count)
    padding = per_dim(call.arg(kernel + 2, "padding", 0), count)
    dilation = per_dim(call.arg(kernel + 3, "dilation", 1) if dilated else 1, count)
    rows = zip(big, small, size, stride, padding, dilation, strict=True)
    return [(is_tiling(b, s, k, st, p, d), is_single_window(b, s, k, p, d)) for b, s, k, st, p, d in rows]


def _adaptive_fits(big: Sequence[Any], small: Sequence[Any]) -> list[Fit]:
    """Windows of adaptive pooling tile a dim if its output size divides the input's."""
    return [(known_equal(b % s, 0) if s != 0 else False, known_equal(s, 1)) for b, s in zip(big, small, strict=True)]


def upsample_nearest(count: int, backward: bool) -> tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]:
    """Nearest-neighbour upsampling by an integer factor k repeats each element: out = (s k). Arguments are (x, size, scales...) or, for the
    gradient, (grad, size, input size, ...)."""
    images = Images((0,), (), small_out=(0,)) if backward else Images((), (0,), big_out=(0,))

    def rule(call: Call) -> Factors:
        centre = 0.5 if "exact" in call.op else 0.0
        scales = call.arg(2) if call.op.endswith(".vec") else call.args[2 + backward :]
        fits = []
        for d, (b, s) in enumerate(zip(*plane_sizes(call, images, count), strict=True)):
            single = known_equal(s, 1) and call.arg(1) is not None
            scale = scales[d] if scales and d < len(scales) else None
            fits.append((not single and repeats(b, s, centre, scale), single))
        return pooling_factors(call, images, count, fits)

    def local(ctx: LocalContext) -> Any:
        plane = list((ctx.input_shape(0) if backward else ctx.output_shape())[-count:])
        values: dict[int, Any] = {} if ctx.call.arg(1) is None else {1: plane}
        if backward:
            values[2] = list(ctx.output_shape())
        return ctx.emit(ctx.target, *replaced(ctx.args, values), **ctx.kwargs)

    return rule, local


def repeats(big: Any, small: Any, centre: float, scale: float | None) -> bool:
    """Whether output i is input i // k in torch's float32 arithmetic; a given scale must equal k."""
    if not (isinstance(big, int) and isinstance(small, int)) or small < 2 or big % small:
        return False
    factor = big // small
    if scale is not None and scale != factor:
        return False
    at = (np.arange(big) + centre).astype(np.float32) * np.float32(1 / factor)
    return bool((at.astype(np.int64) == np.arange(big) // factor).all())


def _register(ops: str, form: tuple[Callable[[Call], Factors], Callable[[LocalContext], Any]]) -> None:
    register(aten_names(ops), form[0], local=form[1])


for _n in (1, 2, 3):
    _register(f"avg_pool{_n}d", avg_pool(_n, False, False))
    _register(f"upsample_nearest{_n}d upsample_nearest{_n}d.vec", upsample_nearest(_n, False))
    _register(f"_upsample_nearest_exact{_n}d _upsample_nearest_exact{_n}d.vec", upsample_nearest(_n, False))
    _register(f"upsample_nearest{_n}d_backward _upsample_nearest_exact{_n}d_backward", upsample_nearest(_n, True))
for _n in (2, 3):
    _register(f"avg_pool{_n}d_backward", avg_pool(_n, False, True))
    _register(f"_adaptive_avg_pool{_n}d", avg_pool(_n, True, False))
    _register(f"_adaptive_avg_pool{_n}d_backward", avg_pool(_n, True, True))
    _register(f"max_pool{_n}d_with_indices", max_pool(_n, False, False))
    _register(f"max_pool{_n}d_with_indices_backward", max_pool(_n, False, True))
    _register(f"adaptive_max_pool{_n}d", max_pool(_n, True, False))
    _register(f"adaptive_max_pool{_n}d_backward", max_pool(_n, True, True))
_register("adaptive_avg_pool1d", avg_pool(1, True, False))
_register("adaptive_max_pool1d", max_pool(1, True, False))
