"""Windows over the space of an image: the two cases in which a dim of space may be cut.

Windows that lie side by side (kernel = stride, nothing padded or left over) make space ``(s k)``: each shard has whole
windows. A single window that spans a dim is a sum over all of it. Windows that overlap would need their neighbours' rows
(a halo), which no placement describes: there space stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxshard.strategies.engine.factors import Name, known_equal
from fxshard.strategies.engine.local import LocalContext

aten = torch.ops.aten
OVERLAP = "space stays whole where windows overlap: rows of neighbours are not exchanged"


def each(value: Any, count: int) -> tuple[Any, ...]:
    """One number for each dim of space, from a number, a list of one, or a list."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(values) * count if len(values) == 1 else tuple(values)


def side_by_side(big: Any, small: Any, kernel: Any, stride: Any, padding: Any = 0, dilation: Any = 1) -> bool:
    """Whether ``small`` windows cover ``big`` elements, each once."""
    close = stride == kernel and padding == 0 and (dilation == 1 or kernel == 1)
    return close and known_equal(big, kernel * small)


def spanning(big: Any, small: Any, kernel: Any, padding: Any = 0, dilation: Any = 1) -> bool:
    """Whether one window is all of ``big``."""
    return padding == 0 and dilation == 1 and known_equal(small, 1) and known_equal(big, kernel)


def space(place: int, tiles: bool, spans: bool) -> tuple[Name, Name, Name]:
    """Names of dim ``place`` of space in the larger image, in the window, and in the smaller one."""
    if spans:
        return f"k{place}", f"k{place}", ""
    if tiles:
        return (f"s{place}", f"k{place}!"), f"k{place}!", f"s{place}"
    return f"s{place}!", f"w{place}!", f"y{place}!"


def moved_index(ctx: LocalContext, index: Any, source: Sequence[int], target: Sequence[int], offsets: Sequence[Any], sign: int) -> Any:
    """Flat places in a plane of sizes ``source`` as those in ``target``, each coordinate moved by ``sign`` times its offset."""
    total: Any = None
    for d, offset in enumerate(offsets):
        step = ctx.emit(aten.div.Scalar_mode, index, math.prod(source[d + 1 :]), rounding_mode="floor")
        at = ctx.emit(aten.remainder.Scalar, step, source[d])
        at = at if isinstance(offset, int) else ctx.emit(aten.add.Tensor, at, offset, alpha=sign)
        at = ctx.emit(aten.mul.Scalar, at, math.prod(target[d + 1 :]))
        total = at if total is None else ctx.emit(aten.add.Tensor, total, at)
    return total
