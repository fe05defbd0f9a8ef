"""While tracing: calls that torch would decompose differently per device or layout become one node each, an operator of fxshard.

torch's functions written in Python (``F.multi_head_attention_forward``) run under the mode, so that the functions they call are replaced
too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import c_nn
from fxshard._torch_compat.dynamo.transforms import in_transform
from fxshard._torch_compat.operators import safe_softmax
from fxshard._torch_compat.sizes.symbols import surely
from fxshard.passes.trace.functions.cross_entropy import LOSSES, LogSoftmaxes
from fxshard.passes.trace.functions.draws import DRAWS, masked
from fxshard.passes.trace.functions.norms import STATISTICS
from fxshard.passes.trace.functions.recurrent import RECURRENT
from fxshard.passes.trace.functions.resample import interpolate
from fxshard.passes.trace.functions.reshapes import RESHAPES

LETTERS = "abcdefghijklmnopqrstuvwxyz"


CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""The checks by which torch's Python functions decide whether to dispatch to a mode."""


class Neutralise(TorchFunctionMode):
    """Routes matmuls, attention, cross-entropy and random operators to ``torch.ops.fxshard``; other functions run unchanged, and all
    within transforms of ``torch.func``.

    ``replacements``: further functions -> replacements, which run under this mode.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.replacements = replacements or {}
        self.draws: Iterator[int] = itertools.count()
        self.log_softmaxes = LogSoftmaxes()
        self._inside: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_transform():  # our operators have no rules for vmap, grad and jvp, torch's do
            return func(*args, **kwargs)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            result = replacement(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in self.replacements:
            with self:
                return self.replacements[func](*args, **kwargs)
        body = _body(func) if isinstance(func, FunctionType) and func not in self._inside else None
        return func(*args, **kwargs) if body is None else self._look_into(func, body, args, kwargs)

    def _look_into(self, func: Any, body: Any, args: Any, kwargs: Any) -> Any:
        """Runs ``func``'s body under this mode. ``func`` itself is not entered again if it calls its built-in namesake."""
        self._inside.append(func)
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._inside.pop()


@cache
def _body(func: FunctionType) -> FunctionType | None:
    """``func`` with its ``has_torch_function`` check disabled, so that its body runs under the mode. None for functions without one."""
    asked = [name for name in CHECKS if name in func.__code__.co_names and name in func.__globals__]
    if not asked:
        return None
    names = {**func.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands in the autocast dtype if autocast is enabled, as in torch's own matmuls."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _contract(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    return torch.ops.fxshard.einsum(*_cast(a, b), equation)


def _linear(_: Neutralise, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() < 1:
        return NotImplemented
    lead = LETTERS[: input.dim() - 1]
    out = _contract(input, weight, f"{lead}y,zy->{lead}z")
    return out if bias is None else out + (bias if bias.dtype == out.dtype else bias.to(out.dtype))


def _matmul(_: Neutralise, input: torch.Tensor, other: torch.Tensor, *, out: Any = None) -> Any:
    """Squeezes broadcast dims of size 1, so that every letter has one size."""
    if out is not None or not (input.dim() and other.dim()) or not isinstance(other, torch.Tensor):
        return NotImplemented
    count = max(input.dim(), other.dim(), 2) - 2
    batch = LETTERS[:count]
    a_names = batch[count - max(input.dim() - 2, 0) :] + ("xy" if input.dim() > 1 else "y")
    b_names = batch[count - max(other.dim() - 2, 0) :] + ("yz" if other.dim() > 1 else "y")
    result = batch + ("x" if input.dim() > 1 else "") + ("z" if other.dim() > 1 else "")
    a, a_names = _squeeze(input, a_names, other, b_names)
    b, b_names = _squeeze(other, b_names, a, a_names)
    return _contract(a, b, f"{a_names},{b_names}->{result}")


def _squeeze(a: torch.Tensor, a_names: str, b: torch.Tensor, b_names: str) -> tuple[torch.Tensor, str]:
    sizes = dict(zip(b_names, b.shape, strict=True))
    dims = [d for d, n in enumerate(a_names) if n not in "xyz" and surely(a.shape[d] == 1) and not surely(sizes.get(n, 1) == 1)]
    return (a.squeeze(dims) if dims else a), "".join(n for d, n in enumerate(a_names) if d not in dims)


def _mm(mode: Neutralise, input: torch.Tensor, mat2: torch.Tensor, out_dtype: Any = None, *, out: Any = None) -> Any:
    return NotImplemented if out_dtype is not None or out is not None else _matmul(mode, input, mat2)


def _addmm(
    mode: Neutralise, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, **other: Any
) -> Any:
    """beta input + alpha mat1 mat2. beta = 0, which ignores even NaN in input, is left to torch."""
    if beta == 0 or any(value is not None for value in other.values()) or not isinstance(mat2, torch.Tensor):
        return NotImplemented
    product = _matmul(mode, mat1, mat2)
    input = input if beta == 1 else input * beta
    return (product if alpha == 1 else product * alpha) + input.to(product.dtype)


def _baddbmm(mode: Neutralise, input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **scales: Any) -> Any:
    return _addmm(mode, input, batch1, batch2, **scales)


def _einsum(_: Neutralise, equation: Any, *operands: Any) -> Any:
    """Only plain two-operand equations in which every letter occurs in at least two terms; others run torch's implementation."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return NotImplemented
    equation = equation.replace(" ", "")
    left, result = equation.split("->")
    parts = [*left.split(","), result]
    letters = set("".join(parts))
    once_each = all(len(set(p)) == len(p) for p in parts)
    twice = all(sum(letter in p for p in parts) >= 2 for letter in letters)
    a, b = operands
    sizes_agree = all(a.shape[parts[0].index(x)] == b.shape[parts[1].index(x)] for x in set(parts[0]) & set(parts[1]))
    return _contract(a, b, equation) if once_each and twice and sizes_agree else NotImplemented


def _sdpa(
    mode: Neutralise,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not 0 <= dropout_p <= 1:  # torch raises the error
        return NotImplemented
    query, key, value = _cast(query, key, value)
    if query.dim() == key.dim() == value.dim() in (2, 3) and not enable_gqa:  # kernels take four dims: one head, a batch of one
        lifted = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(-3)
        query, key, value = (t.unsqueeze(-3) for t in (query, key, value))
        return _sdpa(mode, query, key, value, lifted, dropout_p, is_causal, scale=scale).squeeze(-3)
    query, key, value = _one_batch(query, key, value)
    enable_gqa = enable_gqa or (query.dim() == 4 and key.shape[1:2] == value.shape[1:2] == (1,))
    learned = attn_mask is not None and attn_mask.requires_grad
    if dropout_p or learned or not _fits_kernel(query, key, value, enable_gqa):
        return _math_sdpa(mode, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    own, size, wide = query.shape[-1], value.shape[-1], max(query.shape[-1], value.shape[-1])
    if own != size:  # zeros change neither scores nor, once they are cut off, results
        scale = 1 / math.sqrt(own) if scale is None else scale
        query, key, value = (F.pad(t, (0, wide - t.shape[-1])) if t.shape[-1] != wide else t for t in (query, key, value))
    out = torch.ops.fxshard.sdpa(query, key, value, attn_mask, is_causal, scale, grouped)[0]
    return out if size == wide else out[..., :size].contiguous()


def _one_batch(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Expands a batch of one to that of the others: torch's attention broadcasts, its kernels do not."""
    if any(t.dim() != 4 for t in tensors):
        return tensors
    ones = [surely(t.shape[0] == 1) for t in tensors]
    batch = next((t.shape[0] for t, one in zip(tensors, ones, strict=True) if not one), 1)
    return tuple(t.expand(batch, -1, -1, -1) if one and not surely(batch == 1) else t for t, one in zip(tensors, ones, strict=True))


def _fits_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gqa: bool) -> bool:
    """Whether the kernels support these shapes, once heads of values have the size of those of keys; they neither broadcast nor check
    shapes."""
    if any(t.dim() != 4 for t in (q, k, v)) or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        return False
    return q.shape[1] == k.shape[1] or (gqa and q.shape[1] % k.shape[1] == 0)


def _math_sdpa(mode: Neutralise, q: Any, k: Any, v: Any, mask: Any, p: float, is_causal: bool, scale: Any, gqa: bool) -> torch.Tensor:
    """softmax(q k^T scale + mask) v in plain operators: for dropout, a learned mask, or shapes that no kernel supports."""
    if gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = _matmul(mode, q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        weights = scores.softmax(-1)
    else:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        weights = safe_softmax(scores, -1)
    if p:
        weights = masked(mode, weights, p, "scaled_dot_product_attention")
    return _matmul(mode, weights, v)


_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **DRAWS,
    **LOSSES,
    **STATISTICS,
    **RECURRENT,
    **RESHAPES,
    F.linear: _linear,
    c_nn.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.bmm: _mm,
    torch.Tensor.bmm: _mm,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.baddbmm: _baddbmm,
    torch.Tensor.baddbmm: _baddbmm,
    torch.einsum: _einsum,
    F.interpolate: interpolate,
    F.scaled_dot_product_attention: _sdpa,
    c_nn.scaled_dot_product_attention: _sdpa,
}
_OF_OPERATORS = {
    torch.ops.aten.linear.default: F.linear,
    torch.ops.aten.matmul.default: torch.matmul,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.baddbmm.default: torch.baddbmm,
    torch.ops.aten.einsum.default: torch.einsum,
    torch.ops.aten.scaled_dot_product_attention.default: F.scaled_dot_product_attention,
    torch.ops.aten.cross_entropy_loss.default: c_nn.cross_entropy_loss,
    torch.ops.aten.nll_loss_nd.default: c_nn.nll_loss_nd,
    torch.ops.aten.log_softmax.int: torch.log_softmax,
}
"""Operators of exported graphs -> the functions that they stand for, with the same arguments."""
_REPLACEMENTS.update({operator: _REPLACEMENTS[function] for operator, function in _OF_OPERATORS.items()})
