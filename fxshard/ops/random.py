"""Random operators: each draw is keyed by a seed and the draw's number, made for the whole tensor and cut to the shard.

``fxshard::rng_seed`` marks at trace time where the seed enters; it becomes an input of the graph.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("fxshard::rng_seed", mutates_args=())
def rng_seed() -> torch.Tensor:
    """An int64 seed from the default CPU generator; in a planning graph an input, the same on all ranks."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


@rng_seed.register_fake
def _() -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def draw_mask(p: float, seed: torch.Tensor, call: int, shape: list[int]) -> torch.Tensor:
    """The whole tensor's keep-mask: True with probability 1 - p, a function of seed, call and shape alone."""
    generator = torch.Generator().manual_seed((int(seed) ^ (call * 0x9E3779B97F4A7C15)) % 2**63)
    return torch.rand(shape, generator=generator) >= p


def scaled(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` where ``mask`` keeps it, scaled so that its mean stays."""
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


@torch.library.custom_op("fxshard::dropout", mutates_args=())
def dropout(x: torch.Tensor, p: float, seed: torch.Tensor, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x with elements zeroed with probability p and the rest scaled by 1 / (1 - p), the keep-mask)."""
    mask = draw_mask(p, seed, call, list(x.shape)).to(x.device)
    return scaled(x, mask, p), mask


@dropout.register_fake
def _(x: Any, p: float, seed: Any, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)


@torch.library.custom_op("fxshard::dropout_backward", mutates_args=())
def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    return scaled(grad, mask, p)


@dropout_backward.register_fake
def _(grad: Any, mask: Any, p: float) -> torch.Tensor:
    return grad.new_empty(grad.shape)


@torch.library.custom_op("fxshard::dropout_shard", mutates_args=())
def dropout_shard(
    x: torch.Tensor, p: float, seed: torch.Tensor, call: int, shape: list[int], offsets: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dropout`` of a shard: ``shape`` is that of the whole, ``offsets`` (scalar tensors) the shard's place in it."""
    mask = draw_mask(p, seed, call, shape)
    for dim, (offset, size) in enumerate(zip(offsets, x.shape, strict=True)):
        mask = mask.narrow(dim, int(offset), size)
    mask = mask.contiguous().to(x.device)
    return scaled(x, mask, p), mask


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
