"""While tracing: nearest-neighbour upsampling by integer factors becomes a repetition of elements, which works on any spatial sharding.

torch implements it as indexing at computed positions, which needs the whole plane.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.strategies.space.pooling import repeats

CENTRE = {"nearest": 0.0, "nearest-exact": 0.5}


def interpolate(
    _: Any,
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """(n c h w) -> (n c (h k) (w l)); other than integer factors, and invalid arguments, are left to torch."""
    count = input.dim() - 2
    sizes, scales = _each(size, count), _each(scale_factor, count)
    if mode not in CENTRE or count < 1 or (size is None) == (scale_factor is None) or align_corners is not None or antialias:
        return NotImplemented
    if len(sizes or scales or ()) != count:
        return NotImplemented
    space = input.shape[2:]
    wanted: list[Any] = sizes or [] if scales is None else [int(s * f) for s, f in zip(space, scales, strict=True)]
    rows = zip(wanted, space, scales or [None] * count, strict=True)
    if not all(w == s or repeats(w, s, CENTRE[mode], f) for w, s, f in rows):
        return NotImplemented
    return _repeated(input, [w // s for w, s in zip(wanted, space, strict=True)])


def _each(value: Any, count: int) -> list[Any] | None:
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


def _repeated(x: torch.Tensor, factors: list[int]) -> torch.Tensor:
    """Repeats each element along dim d + 2 ``factors[d]`` times."""
    pairs = list(zip(x.shape[2:], factors, strict=True))
    apart = [s for size, k in pairs for s in ((size, 1) if k > 1 else (size,))]
    spread = [s for size, k in pairs for s in ((size, k) if k > 1 else (size,))]
    repeated = x.reshape([*x.shape[:2], *apart]).expand([*x.shape[:2], *spread])
    return repeated.reshape([*x.shape[:2], *(size * k for size, k in pairs)])
