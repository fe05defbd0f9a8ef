"""Random operators: each draw is keyed by a seed and the draw's number, made for the whole tensor and cut to the shard.

``random`` draws numbers, ``dropout`` masks and scales; their ``_shard`` forms give a rank its part of the same draw.
``rng_seed`` marks at trace time where the seed enters; it becomes an input of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

KINDS = ("uniform", "normal", "integers", "permutation")
"""[0, 1); mean 0 and deviation 1; low to high - 1; 0 to n - 1, each once."""


@torch.library.custom_op("fxshard::rng_seed", mutates_args=())
def rng_seed() -> torch.Tensor:
    """An int64 seed from the default CPU generator; in a planning graph an input, the same on all ranks."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


@rng_seed.register_fake
def _() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _generator(seed: torch.Tensor, call: int) -> torch.Generator:
    """The generator of one draw, a function of seed and call alone."""
    return torch.Generator().manual_seed((int(seed) ^ (call * 0x9E3779B97F4A7C15)) % 2**63)


def draw(kind: str, low: int, high: int, shape: Sequence[int], dtype: torch.dtype, seed: torch.Tensor, call: int) -> torch.Tensor:
    """The whole tensor of one draw, on the CPU."""
    generator = _generator(seed, call)
    if kind == "uniform":
        return torch.rand(shape, generator=generator, dtype=dtype)
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=dtype)
    if kind == "integers":
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)
    if kind == "permutation":
        return torch.randperm(shape[0], generator=generator, dtype=dtype)
    raise RuntimeError(f"random: kind {kind!r} is none of {', '.join(KINDS)}")


def cut(whole: torch.Tensor, offsets: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The part of ``whole`` that starts at ``offsets`` (scalar tensors)."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, int(offset), size)
    return whole.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("fxshard::random", mutates_args=())
def random(
    kind: str,
    low: int,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Numbers of one of ``KINDS``, the same for the same arguments on every device; ``low`` and ``high`` bound integers."""
    return draw(kind, low, high, shape, dtype, seed, call).to(device or seed.device)


@random.register_fake
def _(kind: str, low: int, high: int, shape: Any, dtype: Any, seed: Any, call: int, device: Any = None) -> torch.Tensor:
    return _empty_by(seed, shape, dtype, device)


@torch.library.custom_op("fxshard::random_shard", mutates_args=())
def random_shard(
    kind: str,
    low: int,
    high: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    seed: torch.Tensor,
    call: int,
    sizes: Sequence[int],
    offsets: Sequence[torch.Tensor],
    device: torch.device | None = None,
) -> torch.Tensor:
    """The shard of ``random`` of ``shape`` that has ``sizes`` and starts at ``offsets``."""
    return cut(draw(kind, low, high, shape, dtype, seed, call), offsets, sizes).to(device or seed.device)


@random_shard.register_fake
def _(
    kind: str, low: int, high: int, shape: Any, dtype: Any, seed: Any, call: int, sizes: Any, offsets: Any, device: Any = None
) -> torch.Tensor:
    return _empty_by(seed, sizes, dtype, device)


def _empty_by(seed: Any, shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Meta where the seed is: shapes are being worked out, not devices."""
    return torch.empty(shape, dtype=dtype, device=seed.device if device is None or seed.device.type == "meta" else device)


def draw_mask(p: float, seed: torch.Tensor, call: int, shape: Sequence[int]) -> torch.Tensor:
    """The whole tensor's keep-mask: True with probability 1 - p."""
    return draw("uniform", 0, 0, shape, torch.float32, seed, call) >= p


def scaled(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` where ``mask`` keeps it, scaled so that its mean stays."""
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


@torch.library.custom_op("fxshard::dropout", mutates_args=())
def dropout(x: torch.Tensor, p: float, seed: torch.Tensor, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x with elements zeroed with probability p and the rest scaled by 1 / (1 - p), the keep-mask)."""
    mask = draw_mask(p, seed, call, x.shape).to(x.device)
    return scaled(x, mask, p).contiguous(), mask


@dropout.register_fake
def _(x: Any, p: float, seed: Any, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@torch.library.custom_op("fxshard::dropout_backward", mutates_args=())
def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """The gradient where the mask keeps, scaled as the forward was."""
    return scaled(grad, mask, p).contiguous()


@dropout_backward.register_fake
def _(grad: Any, mask: Any, p: float) -> torch.Tensor:
    return grad.new_empty(grad.shape)


@torch.library.custom_op("fxshard::dropout_shard", mutates_args=())
def dropout_shard(
    x: torch.Tensor, p: float, seed: torch.Tensor, call: int, shape: Sequence[int], offsets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dropout`` of a shard: ``shape`` is that of the whole, ``offsets`` (scalar tensors) the shard's place in it."""
    mask = cut(draw_mask(p, seed, call, shape), offsets, x.shape).to(x.device)
    return scaled(x, mask, p).contiguous(), mask


@dropout_shard.register_fake
def _(x: Any, p: float, seed: Any, call: int, shape: Any, offsets: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.p = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return torch.ops.fxshard.dropout_backward(grad, mask, ctx.p), None, None, None


dropout.register_autograd(_backward, setup_context=_setup)


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.p = inputs[2]
    ctx.save_for_backward(inputs[1])


def _backward_twice(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return torch.ops.fxshard.dropout_backward(grad, mask, ctx.p), None, None


dropout_backward.register_autograd(_backward_twice, setup_context=_setup_twice)
