"""Operators on the spatial dims (planes) of images: resampling, padding, im2col.

Spatial dims stay whole if an output element depends on neighbouring elements; all dims before them can be sharded.
"""

from __future__ import annotations

from typing import Any

from fxshard.graph.call import Call, TensorMeta
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.factors import MOVEMENT, SUMS, Factors, Name, Rule, factors, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.notation import rule
from fxshard.strategies.engine.registry import register, replaced
from fxshard.strategies.tensors.pointwise import aten_names
from fxshard.strategies.tensors.windows import OVERLAP, is_tiling, per_dim


def planes(space: int, *groups: tuple[int, ...], ops: tuple[str, ...] = SUMS) -> Rule:
    """The last ``space`` dims of every tensor stay whole; reductions ``ops`` pass through ``groups`` of arguments.

    Sums of integers do not pass, because the operator rounds its averages.
    """

    def on_planes(call: Call) -> Factors:
        metas = (*call.operands, *call.outputs)

        def of(meta: TensorMeta | None, index: int) -> list[str]:
            ndim = meta.ndim if meta else 0
            return [f"d{d}" if d < ndim - space else f"s{index}_{d}!" for d in range(ndim)]

        dims = [of(meta, i) for i, meta in enumerate(metas)]
        count = len(call.operands)
        rounds = ops == SUMS and not all(is_inexact(o.dtype) for o in call.outputs if o is not None)
        return factors(dims[:count], dims[count:], linear=() if rounds else linear_groups(call, groups, ops))

    return on_planes


def pixel_shuffle(call: Call) -> Factors:
    """(c r r) h w -> c (h r) (w r)."""
    lead = [f"b{i}" for i in range(call.operands[0].ndim - 3)]
    deep: list[Name] = [*lead, ("c", "r!", "q!"), "h", "w"]
    wide: list[Name] = [*lead, "c", ("h", "r!"), ("w", "q!")]
    sizes = {"r": call.arg(1), "q": call.arg(1)}
    ends = (deep, wide) if call.op == "aten.pixel_shuffle.default" else (wide, deep)
    return factors([ends[0]], [ends[1]], sizes=sizes, linear=linear_groups(call, [(0,)], MOVEMENT))


def columns(call: Call) -> Factors:
    """im2col, c h w -> (c kh kw) (rows columns), and col2im; both are linear.

    If the windows tile h, h is (rows kh) and rows can be sharded; w is not outermost in the result, so it stays whole.
    """
    unfolds = call.op == "aten.im2col.default"
    lead = [f"b{i}" for i in range(call.operands[0].ndim - (3 if unfolds else 2))]
    first = 1 if unfolds else 2
    (kernel, width), (dilation, _), (padding, _), (stride, _) = (per_dim(call.arg(first + i), 2) for i in range(4))
    shown = call.operands[0] if unfolds else call.outputs[0]
    assert shown is not None
    rows = shown.shape[-2] // kernel
    tiles = is_tiling(shown.shape[-2], rows, kernel, stride, padding, dilation)
    image: list[Name] = [*lead, "c", ("r", "kh!") if tiles else "h!", "w!"]
    table: list[Name] = [*lead, ("c", "kh!", "kw!"), ("r", "l!") if tiles else "l!"]
    sizes = {"kh": kernel, "kw": width} | ({"r": rows} if tiles else {})
    ends = (image, table) if unfolds else (table, image)
    return factors([ends[0]], [ends[1]], sizes=sizes, linear=linear_groups(call, [(0,)]), note="" if tiles else OVERLAP)


def local_folded(ctx: LocalContext) -> Any:
    """Replaces the size of the image by that of the shard."""
    return ctx.emit(ctx.target, *replaced(ctx.args, {1: list(ctx.output_shape()[-2:])}), **ctx.kwargs)


def local_grid(ctx: LocalContext) -> Any:
    """Replaces the batch size by that of the shard."""
    size = [ctx.input_shape(0)[0], *ctx.call.arg(1)[1:]]
    return ctx.emit(ctx.target, *replaced(ctx.args, {1: size}), **ctx.kwargs)


register(aten_names("pixel_shuffle pixel_unshuffle"), pixel_shuffle)
register(aten_names("im2col"), columns)
register(aten_names("col2im"), columns, local=local_folded)
register(aten_names("grid_sampler_2d"), rule("n c _ _, n h w _ -> n c h w", linear=[(0,)]))
register(aten_names("grid_sampler_3d"), rule("n c _ _ _, n d h w _ -> n c d h w", linear=[(0,)]))
register(aten_names("grid_sampler_2d_backward"), rule("n c h w, n c x! y!, n h w p! -> n c x! y!, n h w p!", linear=[(0,)]))
for _n in (1, 2, 3):
    register(aten_names(f"reflection_pad{_n}d replication_pad{_n}d"), planes(_n, (0,), ops=MOVEMENT))
    register(aten_names(f"reflection_pad{_n}d_backward replication_pad{_n}d_backward"), planes(_n, (0,)))
for _op in ("upsample_bilinear2d", "upsample_bicubic2d"):
    register(aten_names(f"{_op} {_op}.vec"), planes(2, (0,)))
    register(aten_names(f"{_op}_backward"), planes(2, (0,)), size_argument=2)
register(
    aten_names("_upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec"), planes(2, (0,))
)
register(aten_names("_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"), planes(2, (0,)), size_argument=2)
register(aten_names("max_unpool2d"), planes(2, (0,)))
register(aten_names("max_unpool3d"), planes(3, (0,)))
register(aten_names("fractional_max_pool2d"), rule("... s! t!, ... p! -> ... u! v!, ... u! v!"))
register(aten_names("fractional_max_pool3d"), rule("... r! s! t!, ... p! -> ... u! v! w!, ... u! v! w!"))
register(aten_names("affine_grid_generator"), rule("n _ _ -> n _ _ _", linear=[(0,)]), local=local_grid)
register(aten_names("upsample_linear1d"), planes(1, (0,)))
register(aten_names("upsample_linear1d_backward"), planes(1, (0,)), size_argument=2)
register(aten_names("upsample_trilinear3d"), planes(3, (0,)))
register(aten_names("upsample_trilinear3d_backward"), planes(3, (0,)), size_argument=2)
