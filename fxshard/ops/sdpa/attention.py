"""``fxshard::sdpa`` and its backward: scaled dot-product attention as one node, which runs the device's kernel."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxshard.ops.kernels import operator

aten = torch.ops.aten
FLASH_DIM = 256
"""The largest head dim of the flash kernel (pytorch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash)."""

FLASH_CAPABILITY = (8, 0)
"""The least compute capability of a GPU that runs the flash kernel: Ampere (the same file, check_flash_attention_hardware_support)."""


def _heads(q: torch.Tensor, kv: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Repeats k or v to q's heads (dim -3), for kernels without grouped-query attention."""
    return kv.repeat_interleave(q.shape[-3] // kv.shape[-3], -3) if enable_gqa else kv


def _rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Makes the last dim contiguous, which kernels assume without a check."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _ungroup(grad: torch.Tensor, kv: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
    """Sums the gradient over the query heads that share a head of k or v."""
    return grad.unflatten(-3, (kv.shape[-3], -1)).sum(-3) if enable_gqa else grad


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A mask as an additive bias, where True keeps; whole on CUDA, as its kernel requires."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    return mask if mask is None or q.device.type != "cuda" else mask.expand(*q.shape[:-1], k.shape[-2])


def takes_flash(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> bool:
    """Whether CUDA's flash kernel computes this attention; its causal cut starts at the last query and key, aten's at the first."""
    half, dim = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    return half and mask is None and dim % 8 == 0 and dim <= FLASH_DIM and not (is_causal and q.shape[-2] != k.shape[-2])


def has_flash(device: torch.device) -> bool:
    """Whether ``device`` runs CUDA's flash kernel: the GPU, or the one that ``without_gpu`` stands in for; with neither, True."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _is_empty(*tensors: torch.Tensor) -> bool:
    """Whether there are no sequences, heads, queries or keys, for which torch's CPU kernel divides by zero; a symbolic size is never 0."""
    return any(isinstance(size, int) and size == 0 for tensor in tensors for size in tensor.shape[:-1])


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype of the logsumexp of attention of ``q``."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@operator(lambda q, k, v, *_: (q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))))
def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [b, h, s, d] over k, v [b, h or h/g, t, d] -> (out [b, h, s, d], logsumexp [b, h, s]).

    Runs the device's kernel in aten: flash on CPU; on CUDA flash if it can (``has_flash``, ``takes_flash``), else memory-efficient.
    """
    if _is_empty(q, k):
        return q.new_zeros([*q.shape[:-1], v.shape[-1]]), q.new_full(q.shape[:-1], -math.inf, dtype=lse_dtype(q))
    q, keys, values = _rows(q, _heads(q, k, enable_gqa), _heads(q, v, enable_gqa))
    bias = _bias(mask, q, k)
    if has_flash(q.device) and takes_flash(q, k, mask, is_causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, is_causal, False, scale=scale)
    elif q.device.type == "cuda":
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, keys, values, bias, True, 0.0, is_causal, scale=scale)
        lse = lse[..., : q.shape[-2]]
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out.contiguous(), lse.contiguous()


@operator(lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))
def sdpa_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    if _is_empty(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grad, q, keys, values, out = _rows(grad, q, _heads(q, k, enable_gqa), _heads(q, v, enable_gqa), out)
    bias = _bias(mask, q, k)
    if has_flash(q.device) and takes_flash(q, k, mask, is_causal):
        random, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)
        sizes = None, None, q.shape[-2], k.shape[-2]  # None: sequences of one length
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, keys, values, out, lse, *sizes, 0.0, is_causal, random, unused, scale=scale
        )
    elif q.device.type == "cuda":
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, keys, values, bias, out, padded, unused, unused, 0.0, [True, True, True, False], is_causal, scale=scale
        )
        dq, dk, dv = grads[:3]
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys, values, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    return dq.contiguous(), _ungroup(dk, k, enable_gqa).contiguous(), _ungroup(dv, v, enable_gqa).contiguous()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale, ctx.enable_gqa = inputs
    ctx.save_for_backward(q, k, v, mask, *output)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    grads = torch.ops.fxshard.sdpa_backward(grad, q, k, v, out, lse, mask, ctx.is_causal, ctx.scale, ctx.enable_gqa)
    return (*grads, None, None, None, None)


torch.library.register_autograd("fxshard::sdpa", _backward, setup_context=_setup)
