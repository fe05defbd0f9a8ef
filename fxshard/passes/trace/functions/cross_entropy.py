"""While tracing: cross-entropy of class indices in operators that allow the class dim to be sharded.

Forward and backward are written together, so that the backward reuses the forward's reductions and needs no sum over the classes of its
own. Replaced are ``F.cross_entropy``, and ``F.nll_loss`` of an unmodified ``log_softmax`` over the same dim; ``F.nll_loss`` of any other
tensor becomes the same without the softmax. Loss modules call these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import c_nn
from fxshard._torch_compat.fakes import changes_of

MEAN, SUM = 1, 2
"""torch's codes of reductions; 0 is none."""


@dataclass(frozen=True)
class Normalised:
    """A log_softmax of ``x`` over ``dim``; ``changes``: the in-place version counters of the result and ``x`` at that time."""

    x: Tensor
    dim: int
    changes: tuple[int, int]


class LogSoftmaxes:
    """The operands of the log-softmaxes of a trace, by result."""

    def __init__(self) -> None:
        self._made: Any = WeakTensorKeyDictionary()

    def note(self, y: Tensor, x: Tensor, dim: int) -> None:
        self._made[y] = Normalised(x, dim % max(x.dim(), 1), (changes_of(y), changes_of(x)))

    def find(self, y: Tensor, dim: int) -> Tensor | None:
        """The tensor whose log_softmax over ``dim`` is ``y``; None if unknown, or if either was changed in place since."""
        made = self._made.get(y)
        return made.x if made is not None and made.dim == dim and made.changes == (changes_of(y), changes_of(made.x)) else None


def log_softmax(mode: Any, input: Tensor, dim: Any = None, dtype: torch.dtype | None = None, **other: Any) -> Any:
    if not isinstance(dim, int) or other or not input.is_floating_point():
        return NotImplemented
    x = input if dtype is None else input.to(dtype)
    y = x.log_softmax(dim)
    mode.log_softmaxes.note(y, x, dim)
    return y


def cross_entropy(
    mode: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """``torch._C._nn.cross_entropy_loss``."""
    if not _indexes_classes(input, target, weight) or not 0 <= label_smoothing <= 1:
        return NotImplemented
    settings = _Settings(_class_dim(input), int(ignore_index), float(label_smoothing), input.shape[_class_dim(input)])
    x = _exact(input)
    loss, hit = _CrossEntropy.apply(x, target.long(), weight, settings)
    return _reduced(loss, hit, reduction, x.dtype)


def nll_loss(
    mode: Any, input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Any:
    """``torch._C._nn.nll_loss_nd``."""
    if not _indexes_classes(input, target, weight):
        return NotImplemented
    x = mode.log_softmaxes.find(input, _class_dim(input))
    if x is not None:
        return cross_entropy(mode, x, target, weight, reduction, ignore_index)
    settings = _Settings(_class_dim(input), int(ignore_index), 0.0, input.shape[_class_dim(input)])
    x = _exact(input)
    loss, hit = _LogLikelihood.apply(x, target.long(), weight, settings)
    return _reduced(loss, hit, reduction, x.dtype)


def _class_dim(x: Tensor) -> int:
    return min(x.dim() - 1, 1)


def _indexes_classes(x: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether these are logits and class indices. Probabilities as targets and invalid arguments are left to torch."""
    if x.dim() < 1 or not x.is_floating_point() or target.dtype not in (torch.int64, torch.uint8):
        return False
    dim = _class_dim(x)
    fits = [*x.shape[:dim], *x.shape[dim + 1 :]] == list(target.shape)
    if weight is None or not fits:
        return fits
    return weight.shape == x.shape[dim : dim + 1] and weight.dtype == _exact(x).dtype and not weight.requires_grad


def _exact(x: Tensor) -> Tensor:
    """``x`` in float32 if it is half precision and autocast is enabled, as torch computes losses."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if half and torch.is_autocast_enabled(x.device.type) else x


def _reduced(loss: Tensor, hit: Tensor, reduction: int, dtype: torch.dtype) -> Tensor:
    """Reduces the losses; a mean is the sum of losses divided by the sum of weights, both over the whole batch."""
    if reduction == MEAN:
        loss = loss.sum() / hit.sum()
    elif reduction == SUM:
        loss = loss.sum()
    return loss.to(dtype)


@dataclass(frozen=True)
class _Settings:
    dim: int
    ignore_index: int
    smoothing: float
    classes: int


class _CrossEntropy(torch.autograd.Function):
    """x, target, weight -> (loss, weight of the target class) of each sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, at: _Settings) -> Any:
        ops = torch.ops.fxshard
        m = torch.amax(x, at.dim)
        s = ops.sum_exp(x, m, at.dim)
        score = ops.target_score(x, m, target, at.dim, at.ignore_index, at.classes)
        rest = ops.score_sum(x, m, weight, at.dim) if at.smoothing else None
        loss, hit = ops.cross_entropy(score, target, weight, s, rest, at.ignore_index, at.smoothing, at.classes)
        ctx.save_for_backward(x, m, s, target, weight, hit)
        ctx.at = at
        ctx.mark_non_differentiable(hit)
        return loss, hit

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        x, m, s, target, weight, hit = ctx.saved_tensors
        at: _Settings = ctx.at
        slope = None
        if at.smoothing:
            share = at.smoothing / at.classes
            slope = hit * (1 - at.smoothing) + (at.smoothing if weight is None else weight.sum() * share)
        weight = weight if at.smoothing else None
        settings = at.dim, at.ignore_index, at.smoothing, at.classes
        dx = torch.ops.fxshard.cross_entropy_backward(grad, hit, slope, x, m, s, target, weight, *settings)
        return dx, None, None, None


class _LogLikelihood(torch.autograd.Function):
    """As ``_CrossEntropy``, for log-probabilities x: loss = -w[target] x[target]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, at: _Settings) -> Any:
        score = torch.ops.fxshard.target_score(x, None, target, at.dim, at.ignore_index, at.classes)
        loss, hit = torch.ops.fxshard.cross_entropy(score, target, weight, None, None, at.ignore_index, 0.0, at.classes)
        ctx.save_for_backward(target, hit)
        ctx.at, ctx.dtype = at, x.dtype
        ctx.mark_non_differentiable(hit)
        return loss, hit

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        target, hit = ctx.saved_tensors
        at: _Settings = ctx.at
        grad = grad.masked_fill(target == at.ignore_index, 0)
        return torch.ops.fxshard.spread_target(-(grad * hit), target, at.dim, at.classes, ctx.dtype), None, None, None


LOSSES: dict[Any, Callable[..., Any]] = {
    torch.log_softmax: log_softmax,
    torch.Tensor.log_softmax: log_softmax,
    c_nn.cross_entropy_loss: cross_entropy,
    c_nn.nll_loss_nd: nll_loss,
}
"""Function that the user's functions call -> its replacement, whose first argument is the mode."""
