"""Cross-entropy of class indices, decomposed into the target's score, the loss and the gradient; each is correct on a shard of the classes.

With m = max x, s = sum exp(x - m), t = x[target] - m and u = sum_c w_c (x_c - m) over the classes c (``sum_exp`` is in
``softmax.py``), and k = 1 - smoothing, e = smoothing / classes, W = sum_c w_c:

    loss = k w[target] (log s - t) + e (W log s - u), 0 where the target is ignored

    d loss / d x_c = (k w[target] + e W) exp(x_c - m) / s - k w[target] [c = target] - e w_c

``first``: index of the shard's first class; None if the classes are whole.
"""

from __future__ import annotations

from typing import Any

import torch

from fxshard.ops.norms.softmax import accumulation_dtype, minus_max


def target_score_kernel(
    x: torch.Tensor,
    m: torch.Tensor | None,
    target: torch.Tensor,
    dim: int,
    ignore_index: int,
    classes: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernel of ``target_score``. An invalid target that is not ignored indexes out of range, so that the device raises an error."""
    size = x.shape[dim]
    place = target if first is None else target - first
    mine = (place >= 0) & (place < size)
    elsewhere = (target == ignore_index) | ((target >= 0) & (target < classes))
    index = torch.where(mine, place, torch.where(elsewhere, 0, size))
    score = x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    score = score.to(accumulation_dtype(x.dtype))
    return torch.where(mine, score if m is None else score - m, 0)


@torch.library.custom_op("fxshard::target_score", mutates_args=())
def target_score(
    x: torch.Tensor,
    m: torch.Tensor | None,
    target: torch.Tensor,
    dim: int,
    ignore_index: int,
    classes: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """t = x[target] - m along ``dim``; 0 for targets that are ignored or not among the classes of this shard."""
    return target_score_kernel(x, m, target, dim, ignore_index, classes, first).contiguous()


@target_score.register_fake
def _(x: Any, m: Any, target: Any, dim: int, ignore_index: int, classes: int, first: Any = None) -> torch.Tensor:
    return x.new_empty(target.shape, dtype=accumulation_dtype(x.dtype))


def _along(vector: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshapes a vector over the classes to broadcast with ``like``."""
    return vector.view([-1 if d == dim else 1 for d in range(like.dim())])


def score_sum_kernel(x: torch.Tensor, m: torch.Tensor, weight: torch.Tensor | None, dim: int) -> torch.Tensor:
    terms = minus_max(x, m, dim)
    return (terms if weight is None else terms * _along(weight, x, dim)).sum(dim)


@torch.library.custom_op("fxshard::score_sum", mutates_args=())
def score_sum(x: torch.Tensor, m: torch.Tensor, weight: torch.Tensor | None, dim: int) -> torch.Tensor:
    """u = sum_c weight_c (x_c - m) over ``dim``."""
    return score_sum_kernel(x, m, weight, dim).contiguous()


@score_sum.register_fake
def _(x: Any, m: Any, weight: Any, dim: int) -> torch.Tensor:
    return m.new_empty(m.shape, dtype=accumulation_dtype(x.dtype))


def cross_entropy_kernel(
    score: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor | None,
    rest: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    classes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    valid = target != ignore_index
    if weight is None:
        hit = valid.to(score.dtype)
    else:
        hit = torch.where(valid, weight[torch.where(valid, target, 0)], 0).to(score.dtype)
    logs = None if sums is None else sums.log()
    loss = hit * (-score if logs is None else logs - score)
    if smoothing and logs is not None and rest is not None:
        total = classes if weight is None else weight.sum()
        loss = loss * (1 - smoothing) + (logs * total - rest) * (smoothing / classes)
    return torch.where(valid, loss, 0), hit


@torch.library.custom_op("fxshard::cross_entropy", mutates_args=())
def cross_entropy(
    score: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor | None,
    rest: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    classes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, w[target] or 0 if ignored) from t, s and u; without s, x holds log-probabilities and t is x[target]."""
    loss, hit = cross_entropy_kernel(score, target, weight, sums, rest, ignore_index, smoothing, classes)
    return loss.contiguous(), hit.contiguous()


@cross_entropy.register_fake
def _(score: Any, target: Any, weight: Any, sums: Any, rest: Any, ignore_index: int, smoothing: float, classes: int) -> Any:
    return score.new_empty(score.shape), score.new_empty(score.shape)


def _is_target(target: torch.Tensor, like: list[int], dim: int, first: torch.Tensor | None) -> torch.Tensor:
    """[c = target] for the classes of a shard of shape ``like``."""
    places = torch.arange(like[dim], device=target.device)
    places = places if first is None else places + first
    return places.view([-1 if d == dim else 1 for d in range(len(like))]) == target.unsqueeze(dim)


def cross_entropy_backward_kernel(
    grad: torch.Tensor,
    hit: torch.Tensor,
    slope: torch.Tensor | None,
    x: torch.Tensor,
    m: torch.Tensor,
    s: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    ignore_index: int,
    smoothing: float,
    classes: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernel of ``cross_entropy_backward``. Masks the gradient of ignored samples, which is NaN for a mean over ignored samples only."""
    grad = torch.where(target == ignore_index, 0, grad)
    pull = grad * hit * (1 - smoothing) if smoothing else grad * hit
    slope = pull if slope is None else grad * slope
    dx = minus_max(x, m, dim).exp() * (slope / s).unsqueeze(dim)
    dx = dx - torch.where(_is_target(target, list(x.shape), dim, first), pull.unsqueeze(dim), 0)
    if smoothing:
        rest = (grad * (smoothing / classes)).unsqueeze(dim)
        dx = dx - (rest if weight is None else rest * _along(weight, x, dim))
    return dx.to(x.dtype)


@torch.library.custom_op("fxshard::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(
    grad: torch.Tensor,
    hit: torch.Tensor,
    slope: torch.Tensor | None,
    x: torch.Tensor,
    m: torch.Tensor,
    s: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    ignore_index: int,
    smoothing: float,
    classes: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of x from those of the losses; hit = w[target], slope = k hit + e W, None without smoothing."""
    return cross_entropy_backward_kernel(
        grad, hit, slope, x, m, s, target, weight, dim, ignore_index, smoothing, classes, first
    ).contiguous()


@cross_entropy_backward.register_fake
def _(
    grad: Any,
    hit: Any,
    slope: Any,
    x: Any,
    m: Any,
    s: Any,
    target: Any,
    weight: Any,
    dim: int,
    ignore_index: int,
    smoothing: float,
    classes: int,
    first: Any = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def spread_target_kernel(
    values: torch.Tensor, target: torch.Tensor, dim: int, classes: int, dtype: torch.dtype, first: torch.Tensor | None = None
) -> torch.Tensor:
    like = [*target.shape[:dim], classes, *target.shape[dim:]]
    return torch.where(_is_target(target, like, dim, first), values.unsqueeze(dim), 0).to(dtype)


@torch.library.custom_op("fxshard::spread_target", mutates_args=())
def spread_target(
    values: torch.Tensor, target: torch.Tensor, dim: int, classes: int, dtype: torch.dtype, first: torch.Tensor | None = None
) -> torch.Tensor:
    """values [c = target], with a dim of classes c inserted at ``dim``."""
    return spread_target_kernel(values, target, dim, classes, dtype, first).contiguous()


@spread_target.register_fake
def _(values: Any, target: Any, dim: int, classes: int, dtype: torch.dtype, first: Any = None) -> torch.Tensor:
    return values.new_empty([*target.shape[:dim], classes, *target.shape[dim:]], dtype=dtype)
