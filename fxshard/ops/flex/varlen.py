"""``fxshard::varlen_attention`` and its backward: attention within the sequences of a packed batch, torch's ``varlen_attn``, as one node.

On CUDA it runs torch's kernel; on the CPU, which has none, ``fxshard::flex_attention`` with the sequences as its mask.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fxshard._torch_compat.flex_attention import varlen_kernel, varlen_kernel_backward
from fxshard.ops.flex.functions import IDENTITY
from fxshard.ops.kernels import operator
from fxshard.ops.sdpa.attention import lse_dtype

ANY = 2**62
"""More tokens than any sequence has: the side of a window that is open."""


def _text() -> str:
    """The mask (b, h, q, k, sequences of q, of k, positions of q, of k, left, right): the same sequence, -left <= k - q <= right."""
    names = [*"bhqk", "of_q", "of_k", "at_q", "at_k", "left", "right"]
    calls: list[list[Any]] = []

    def call(result: str, name: str, *args: Any) -> None:
        calls.append([f"torch.ops.aten.{name}", [_node(a) for a in args], {"dict": {}}])
        names.append(result)

    def _node(name: Any) -> Any:
        return [_node(one) for one in name] if isinstance(name, list) else {"node": names.index(name)}

    for result, table, place in (("i", "of_q", "q"), ("j", "of_k", "k"), ("m", "at_q", "q"), ("n", "at_k", "k")):
        call(result, "index.Tensor", table, [place])
    call("same", "eq.Tensor", "i", "j")
    call("after", "sub.Tensor", "n", "m")
    call("low", "le.Tensor", "after", "right")
    call("before", "neg.default", "after")
    call("high", "le.Tensor", "before", "left")
    call("both", "bitwise_and.Tensor", "low", "high")
    call("seen", "bitwise_and.Tensor", "same", "both")
    return json.dumps([10, calls, len(names) - 1], separators=(",", ":"))


MASK = _text()


def _sequences(bounds: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(sequence, place in it) of each of ``count`` tokens; those after the last sequence are in one more."""
    token = torch.arange(count, device=bounds.device)
    sequence = torch.searchsorted(bounds.to(torch.int64), token, right=True) - 1
    return sequence, token - bounds[sequence]


def _mask_tensors(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None, left: int, right: int) -> list[Tensor]:
    """The tensors of MASK. The last query of a sequence is at the place of its last key, as in torch's kernel."""
    last = len(cu_q) - 1
    (of_q, at_q), (of_k, at_k) = _sequences(cu_q, q.shape[0]), _sequences(cu_k, k.shape[0])
    lengths = torch.nn.functional.pad(cu_k.diff() if used is None else used, (0, 1))
    ahead = lengths - torch.nn.functional.pad(cu_q.diff(), (0, 1))
    outside = (of_k == last) | (at_k >= lengths[of_k])
    sides = [torch.full((), ANY if side < 0 else side, dtype=torch.int64, device=q.device) for side in (left, right)]
    return [of_q, torch.where(outside, -2, of_k), at_q + ahead[of_q], at_k, *sides]


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[tokens, heads, d] as [1, heads, tokens, d]."""
    return tuple(t.transpose(0, 1).unsqueeze(0) for t in tensors)


def _packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.squeeze(0).transpose(0, 1) for t in tensors)


@operator(lambda q, k, v, *_: (q.new_empty([*q.shape[:-1], v.shape[-1]]), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q))))
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    used: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
    splits: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [s, h, d] over k, v [t, h or h/g, d] -> (out [s, h, d], logsumexp [h, s]).

    ``cu_q``, ``cu_k`` [n + 1]: where sequences begin and end; ``used`` [n]: how many keys of each are seen, or None for all. ``left``,
    ``right``: how many keys before and after its own place a query sees, -1 for all; ``splits``: torch's ``num_splits``.
    """
    if q.device.type == "cuda":
        return varlen_kernel(q, k, v, cu_q, cu_k, used, max_q, max_k, scale, (left, right), splits)
    tensors = _mask_tensors(q, k, cu_q, cu_k, used, left, right)
    out, lse, _ = torch.ops.fxshard.flex_attention(*_batched(q, k, v), [], tensors, None, None, None, IDENTITY, MASK, _scale(q, scale))
    return _packed(out)[0], lse.squeeze(0)


@operator(lambda grad, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)))
def varlen_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.device.type == "cuda":
        return varlen_kernel_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, (left, right))
    tensors = _mask_tensors(q, k, cu_q, cu_k, None, left, right)
    given, *rest = _batched(grad, q, k, v, out)
    mods = (tensors, None, None, None, IDENTITY, MASK, _scale(q, scale))
    dq, dk, dv = torch.ops.fxshard.flex_attention_backward(given, None, *rest, lse.unsqueeze(0), [], *mods, [])
    first, second, third = _packed(dq, dk, dv)
    return first, second, third


def _scale(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1]) ** -0.5 if scale is None else scale


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, used, *ctx.numbers, _ = inputs
    assert used is None, "torch refuses gradients of varlen_attn with seqused_k"
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    grads = torch.ops.fxshard.varlen_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return (*grads, *[None] * 9)


torch.library.register_autograd("fxshard::varlen_attention", _backward, setup_context=_setup)
