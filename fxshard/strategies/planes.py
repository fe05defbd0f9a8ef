"""Operators on the planes of an image: pooling, resampling and padding. Space stays whole, all dims before it are free."""

from __future__ import annotations

import math

from fxshard.call import Call, TensorMeta
from fxshard.strategies.conversion import is_real
from fxshard.strategies.factors import MOVEMENT, Factors, Name, Rule, factors, linear_groups
from fxshard.strategies.notation import rule
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register


def planes(space: int, *groups: tuple[int, ...]) -> Rule:
    """The last ``space`` dims of every tensor whole; ``groups``: argument positions it is linear in (whole numbers are rounded)."""

    def on_planes(call: Call) -> Factors:
        metas = (*call.operands, *call.outputs)

        def of(meta: TensorMeta | None, index: int) -> list[str]:
            ndim = meta.ndim if meta else 0
            return [f"d{d}" if d < ndim - space else f"s{index}_{d}!" for d in range(ndim)]

        dims = [of(meta, i) for i, meta in enumerate(metas)]
        count = len(call.operands)
        rounds = not all(is_real(o.dtype) for o in call.outputs if o is not None)
        return factors(dims[:count], dims[count:], linear=() if rounds else linear_groups(call, groups))

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
    """Windows of an image as columns, c h w -> (c k) l, and back: linear."""
    unfolds = call.op == "aten.im2col.default"
    lead = [f"b{i}" for i in range(call.operands[0].ndim - (3 if unfolds else 2))]
    image: list[Name] = [*lead, "c", "h!", "w!"]
    table: list[Name] = [*lead, ("c", "k!"), "l!"]
    sizes = {"k": math.prod(call.arg(1 if unfolds else 2))}
    ends = (image, table) if unfolds else (table, image)
    return factors([ends[0]], [ends[1]], sizes=sizes, linear=linear_groups(call, [(0,)]))


register(names("pixel_shuffle pixel_unshuffle"), pixel_shuffle)
register(names("im2col col2im"), columns)
register(names("grid_sampler_2d"), rule("n c _ _, n h w _ -> n c h w", linear=[(0,)]))
register(names("grid_sampler_2d_backward"), rule("n c h w, n c x! y!, n h w p! -> n c x! y!, n h w p!", linear=[(0,)]))
for _n in (1, 2, 3):
    register(names(f"avg_pool{_n}d reflection_pad{_n}d replication_pad{_n}d"), planes(_n, (0,)))
    register(names(f"reflection_pad{_n}d_backward replication_pad{_n}d_backward"), planes(_n, (0,)))
    register(names(f"upsample_nearest{_n}d upsample_nearest{_n}d.vec _upsample_nearest_exact{_n}d"), planes(_n, (0,)))
    register(names(f"upsample_nearest{_n}d_backward _upsample_nearest_exact{_n}d_backward"), planes(_n, (0,)), sizes=2)
for _n in (2, 3):
    register(names(f"_adaptive_avg_pool{_n}d _adaptive_avg_pool{_n}d_backward avg_pool{_n}d_backward"), planes(_n, (0,)))
    register(names(f"max_pool{_n}d_with_indices adaptive_max_pool{_n}d"), planes(_n))
    register(names(f"max_pool{_n}d_with_indices_backward adaptive_max_pool{_n}d_backward"), planes(_n, (0,)))
for _op in ("upsample_bilinear2d", "upsample_bicubic2d"):
    register(names(f"{_op} {_op}.vec"), planes(2, (0,)))
    register(names(f"{_op}_backward"), planes(2, (0,)), sizes=2)
register(names("upsample_linear1d"), planes(1, (0,)))
register(names("upsample_linear1d_backward"), planes(1, (0,)), sizes=2)
register(names("upsample_trilinear3d"), planes(3, (0,)))
register(names("upsample_trilinear3d_backward"), planes(3, (0,)), sizes=2)
