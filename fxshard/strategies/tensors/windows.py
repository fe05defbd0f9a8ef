"""Windows over the spatial dims of images: the two cases in which such a dim can be sharded.

Windows that tile a dim (kernel = stride, no padding, no remainder) make it ``(s k)``: each shard has whole
windows. A single window that spans a dim reduces all of it. Overlapping windows would need rows of neighbouring shards
(a halo), which no placement describes: there the dim stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxshard.strategies.engine.factors import Name, known_equal
from fxshard.strategies.engine.local import LocalContext

aten = torch.ops.aten
OVERLAP = "spatial dims stay whole if windows overlap: shards do not exchange rows with their neighbours"


def per_dim(value: Any, count: int) -> tuple[Any, ...]:
    """One number per spatial dim, from a number, a list of one number, or a full list."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(values) * count if len(values) == 1 else tuple(values)


def is_tiling(big: Any, small: Any, kernel: Any, stride: Any, padding: Any = 0, dilation: Any = 1) -> bool:
    """Whether ``small`` windows tile ``big`` elements: each is in exactly one window."""
    close = stride == kernel and padding == 0 and (dilation == 1 or kernel == 1)
    return close and known_equal(big, kernel * small)


def is_single_window(big: Any, small: Any, kernel: Any, padding: Any = 0, dilation: Any = 1) -> bool:
    """Whether a single window covers all ``big`` elements."""
    return padding == 0 and dilation == 1 and known_equal(small, 1) and known_equal(big, kernel)


def space_names(place: int, tiles: bool, spans: bool) -> tuple[Name, Name, Name]:
    """Names of spatial dim ``place`` in the larger image, in the window, and in the smaller image."""
    if spans:
        return f"k{place}", f"k{place}", ""
    if tiles:
        return (f"s{place}", f"k{place}!"), f"k{place}!", f"s{place}"
    return f"s{place}!", f"w{place}!", f"y{place}!"


def shifted_index(ctx: LocalContext, index: Any, source: Sequence[int], target: Sequence[int], offsets: Sequence[Any], sign: int) -> Any:
    """Converts flat indices in a plane of sizes ``source`` to ``target``, shifting each coordinate by ``sign`` times its offset."""
    total: Any = None
    for d, offset in enumerate(offsets):
        step = ctx.emit(aten.div.Scalar_mode, index, math.prod(source[d + 1 :]), rounding_mode="floor")
        at = ctx.emit(aten.remainder.Scalar, step, source[d])
        at = at if isinstance(offset, int) else ctx.emit(aten.add.Tensor, at, offset, alpha=sign)
        at = ctx.emit(aten.mul.Scalar, at, math.prod(target[d + 1 :]))
        total = at if total is None else ctx.emit(aten.add.Tensor, total, at)
    return total
