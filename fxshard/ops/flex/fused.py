"""``flex_attention`` by torch's fused kernels, where Inductor compiles for CUDA: the node becomes lists of blocks and one operator.

The operator ``fxshard::flex_attention_fused`` passes through all passes on a rank's graph as any other. Last, it becomes torch's
``higher_order.flex_attention``, from which Inductor makes a kernel with the functions of mask and score in it
(``runtime/compile/flex_kernels.py``). Its eager form calls torch's operator in its uncompiled form, with all scores in memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxshard._torch_compat.flex_attention import differentiable_index, fused_backward, fused_forward
from fxshard.ops.flex.attention import empty_results, fake_gradients
from fxshard.ops.flex.blocks import block_lists, seen_scores
from fxshard.ops.flex.functions import at_place, function_of
from fxshard.ops.kernels import FUSED, Shared

if TYPE_CHECKING:
    from fxshard.graph.call import TensorMeta

log = logging.getLogger("fxshard")
LN2 = math.log(2)
"""torch's kernels give and take logarithms to the base 2."""
DTYPES, LEAST = (torch.float16, torch.bfloat16, torch.float32), 16
"""The dtypes that the kernels take, and the smallest head."""


def reason_against(q: Tensor | TensorMeta, k: Tensor | TensorMeta, v: Tensor | TensorMeta) -> str | None:
    """Why torch's kernels cannot compute this attention; None if they can."""
    if q.dtype not in DTYPES:
        return f"{q.dtype}"
    if not all(isinstance(size, int) for t in (q, k, v) for size in t.shape):
        return "dynamic sizes"
    if min(q.shape[-1], v.shape[-1]) < LEAST:
        return f"heads of {min(q.shape[-1], v.shape[-1])}, less than {LEAST}"
    return None if math.prod(q.shape) and math.prod(k.shape) else "a shard without queries or keys"


def _lists(shared: Shared, q: Tensor, k: Tensor, mask: str, tensors: Sequence[Tensor], offsets: Sequence[Tensor | None]) -> list[Tensor]:
    """The lists of a mask, made at its first call in a graph: layers and the backward share them."""
    shape, reads = (*q.shape[:3], k.shape[2]), (*tensors, *offsets)
    key = (mask, shape, tuple(map(id, reads)))
    if key not in shared:  # the value holds the tensors, so that their ids stay theirs
        shared[key] = reads, block_lists(seen_scores(shape, mask, tensors, offsets, q.device))
    found: list[Tensor] = shared[key][1]
    return found


def _forward_kernel(shared: Shared, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    score_tensors, mask_tensors, batch, head, row, score, mask, scale = rest
    if (reason := reason_against(q, k, v)) is not None:
        log.info("flex_attention of q %s does not use torch's fused kernel: %s", tuple(q.shape), reason)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.fxshard.flex_attention(q, k, v, *rest)
        return found
    lists = _lists(shared, q, k, mask, mask_tensors, (batch, head, row))
    given = q, k, v, score_tensors, mask_tensors, batch, head, row, lists
    out, lse, most = torch.ops.fxshard.flex_attention_fused(*given, score, mask, scale)
    return out, lse * LN2, most * LN2


def _backward_kernel(shared: Shared, grad: Tensor, grad_lse: Tensor | None, *operands: Any) -> Any:
    q, k, v, out, lse, *rest = operands
    score_tensors, mask_tensors, batch, head, row, score, mask, scale, wanted = rest
    if reason_against(q, k, v) is not None:
        return torch.ops.fxshard.flex_attention_backward(grad, grad_lse, q, k, v, out, lse, *rest)
    lists = _lists(shared, q, k, mask, mask_tensors, (batch, head, row))
    of_lse = None if grad_lse is None else grad_lse * LN2
    given = grad, of_lse, q, k, v, out, lse / LN2, score_tensors, mask_tensors, batch, head, row, lists
    return torch.ops.fxshard.flex_attention_fused_backward(*given, score, mask, scale, wanted)


FUSED[torch.ops.fxshard.flex_attention.default] = _forward_kernel
FUSED[torch.ops.fxshard.flex_attention_backward.default] = _backward_kernel


class Call:
    """A fused attention as torch's operator takes it: functions of the place in the shard, and the tensors that they read."""

    def __init__(
        self, score: str, mask: str, score_tensors: Sequence[Any], mask_tensors: Sequence[Any], offsets: Sequence[Any], index: Any = None
    ) -> None:
        given = tuple(offset is not None for offset in offsets)
        known = tuple(offset for offset in offsets if offset is not None)
        self.score = at_place(function_of(score, index), 1, given)
        self.mask = at_place(function_of(mask), 0, given)
        self.score_reads, self.mask_reads = (*known, *score_tensors), (*known, *mask_tensors)
        self.first = len(known)


@torch.library.custom_op("fxshard::flex_attention_fused", mutates_args=())
def flex_attention_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    batch: Tensor | None,
    head: Tensor | None,
    row: Tensor | None,
    lists: Sequence[Tensor],
    score_mod: str,
    mask_mod: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``fxshard::flex_attention`` with the eight ``lists`` of ``block_lists``; logsumexp and greatest score are to the base 2."""
    call = Call(score_mod, mask_mod, score_tensors, mask_tensors, (batch, head, row))
    out, lse, most = fused_forward(q, k, v, call.score, call.mask, lists, scale, call.score_reads, call.mask_reads)
    return out.contiguous(), lse.contiguous(), most.contiguous()


@torch.library.custom_op("fxshard::flex_attention_fused_backward", mutates_args=())
def flex_attention_fused_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    score_tensors: Sequence[Tensor],
    mask_tensors: Sequence[Tensor],
    batch: Tensor | None,
    head: Tensor | None,
    row: Tensor | None,
    lists: Sequence[Tensor],
    score_mod: str,
    mask_mod: str,
    scale: float,
    wanted: Sequence[int],
) -> list[Tensor]:
    """``fxshard::flex_attention_backward`` with the eight ``lists`` of ``block_lists``; ``lse`` is to the base 2, and ``grad_lse`` is
    its gradient."""
    call = Call(score_mod, mask_mod, score_tensors, mask_tensors, (batch, head, row), differentiable_index())
    graded = [call.first + i for i in wanted]
    reads = call.score_reads, call.mask_reads
    dq, dk, dv, others = fused_backward(grad, grad_lse, q, k, v, out, lse, call.score, call.mask, lists, scale, *reads, graded)
    return [dq.contiguous(), dk.contiguous(), dv.contiguous(), *(others[i].contiguous() for i in graded)]


flex_attention_fused.register_fake(lambda q, k, v, *_: empty_results(q, v))


def _fake_fused_backward(*args: Any) -> list[Tensor]:
    grad, of_lse, q, k, v, out, lse, score_tensors, *_, wanted = args
    return fake_gradients(grad, of_lse, q, k, v, out, lse, score_tensors, wanted)


flex_attention_fused_backward.register_fake(_fake_fused_backward)
