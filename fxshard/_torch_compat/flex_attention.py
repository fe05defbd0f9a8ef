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
    used keys, block table, splits; from 2.15 on the kernel)."""
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


def flex_operators() -> tuple[Any, Any]:
    """torch's operators of attention and its backward, from which Inductor makes kernels."""
    return torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward


def block_mask_entries(queries: int, keys: int, lists: Sequence[Any], mask: Any, size: int = 128) -> tuple[Any, ...]:
    """``BlockMask.as_tuple()`` for eight lists of blocks of ``size`` and a mask function."""
    return (queries, keys, *lists, *[None] * 4, size, size, mask)


def differentiable_index() -> Callable[..., torch.Tensor]:
    """``aten.index`` whose gradient the kernels can add to the tensor that is read."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index

    return mod_index


def joint_graph_of_score(
    score: Callable[..., Any], examples: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    """The graph of the gradients of a ``score_mod``: (score, place, gradient, *reads) -> those of the score, the place (None) and of reads
    that require one. ``examples``: a score that requires a gradient, and the scalars of a place.

    Traced on the CPU, since autograd asks the device of its tensors, which may be absent, and then moved.
    """
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph

    device = examples[0].device
    given, read = ([t.detach().cpu().requires_grad_(t.requires_grad) for t in some] for some in (examples, reads))
    with torch.enable_grad():
        _, joint = create_fw_bw_graph(score, tuple(given), tuple(read))
    assert isinstance(joint, torch.fx.GraphModule)
    for node in joint.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    joint.recompile()
    return joint


def scalars_of_score(like: torch.Tensor, *, grad: bool) -> list[torch.Tensor]:
    """Examples of the arguments of a ``score_mod`` for queries ``like``."""
    return [like.new_zeros(()).requires_grad_(grad), *(like.new_zeros((), dtype=torch.int) for _ in range(4))]


def fused_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score: Callable[..., Any],
    mask: Callable[..., Any],
    lists: Sequence[torch.Tensor],
    scale: float,
    score_reads: Sequence[torch.Tensor],
    mask_reads: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, logsumexp, greatest score), the last two to the base 2, of torch's operator, uncompiled."""
    blocks = block_mask_entries(q.shape[2], k.shape[2], lists, mask)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = flex_operators()[0](
        q, k, v, score, blocks, scale, {}, tuple(score_reads), tuple(mask_reads)
    )
    return found


def fused_backward(
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    score: Callable[..., Any],
    mask: Callable[..., Any],
    lists: Sequence[torch.Tensor],
    scale: float,
    score_reads: Sequence[torch.Tensor],
    mask_reads: Sequence[torch.Tensor],
    graded: Sequence[int],
) -> tuple[Any, ...]:
    """Gradients of q, k, v and, in a tuple, of those of ``score_reads`` that are ``graded``, of torch's operator, uncompiled."""
    blocks = block_mask_entries(q.shape[2], k.shape[2], lists, mask)
    reads = [read.detach().requires_grad_(i in graded) for i, read in enumerate(score_reads)]
    joint = joint_graph_of_score(score, scalars_of_score(q, grad=True), reads)
    with torch.no_grad():
        found: tuple[Any, ...] = flex_operators()[1](
            q, k, v, out, lse, grad, grad_lse, score, joint, blocks, scale, {}, tuple(reads), tuple(mask_reads)
        )
    return found
