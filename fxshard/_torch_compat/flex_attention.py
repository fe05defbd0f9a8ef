"""Private names of torch (2.13): ``flex_attention`` as one operator, on the CPU too, its functions as graphs, ``varlen_attn``'s kernels.

What would replace them: ``flex_attention`` that is traced for training on any device, a documented way to trace its functions, and public
operators for the kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxshard._torch_compat.patched import patched


def flex_attention_of_any_device() -> contextlib.AbstractContextManager[None]:
    """While Dynamo captures: allow training with flex_attention on the CPU, where models are traced; its kernels never run there."""
    from torch.nn.attention import flex_attention as module

    return patched(module, "_validate_device", lambda query, key, value: None)


def is_flex_attention(target: Any) -> bool:
    """Whether a node of a captured graph calls ``flex_attention``: (q, k, v, score_mod, block mask, scale, options, buffers, buffers)."""
    return target is torch.ops.higher_order.flex_attention


def graph_of_mod(mod: Callable[..., Any], examples: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """The aten graph of a ``mask_mod`` or ``score_mod`` on fake scalars, in which indexing by a scalar is ``aten.index``."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), TransformGetItemToIndex():
        return make_fx(mod)(*examples)


def is_varlen_attention(target: Any) -> bool:
    """Whether a node of a captured graph calls ``varlen_attn``: (q, k, v, bounds of q, of k, longest q, k, is_causal, scale, window, gqa,
    used keys, block table, splits)."""
    return "torch_attn::_varlen_attn" in (
        str(getattr(target, "_qualified_op_name", "")),
        getattr(target, "_name", "").removesuffix(".default"),
    )


def varlen_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used: torch.Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: tuple[int, int],
    splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logsumexp) of torch's kernel, which only CUDA has."""
    import torch.nn.attention.varlen

    grouped = q.shape[1] != k.shape[1]
    given = (q, k, v, cu_q, cu_k, max_q, max_k, window == (-1, 0), scale, list(window), grouped, used, None, splits)
    out, lse, _ = torch.ops.torch_attn._varlen_attn(*given)
    return out, lse


def varlen_kernel_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v by torch's kernel. It gets a state of random numbers, of which it uses none without dropout."""
    import torch.nn.attention.varlen

    state = torch.zeros((2,), dtype=torch.uint64, device=q.device)
    given = (grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, window == (-1, 0), state, scale, list(window))
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(*given)
    return found
