"""Cross-entropy of class indices, decomposed into the target's score, the loss and the gradient; each is correct on a shard of the classes.

With m = max x, s = sum exp(x - m), t = x[target] - m and u = sum_c w_c (x_c - m) over the classes c (``sum_exp`` is in
``softmax.py``), and k = 1 - smoothing, e = smoothing / classes, W = sum_c w_c:

    loss = k w[target] (log s - t) + e (W log s - u), 0 where the target is ignored

    d loss / d x_c = (k w[target] + e W) exp(x_c - m) / s - k w[target] [c = target] - e w_c

``first``: index of the shard's first class; None if the classes are whole.
"""

from __future__ import annotations

import torch

from fxshard.ops.kernels import operator
from fxshard.ops.norms.softmax import accumulation_dtype, minus_max


@operator(lambda x, m, target, *_: x.new_empty(target.shape, dtype=accumulation_dtype(x.dtype)))
def target_score(
    x: torch.Tensor,
    m: torch.Tensor | None,
    target: torch.Tensor,
    dim: int,
    ignore_index: int,
    classes: int,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """t = x[target] - m along ``dim``; 0 for targets that are ignored or not among the classes of this shard.

    An invalid target that is not ignored indexes out of range, so that the device raises an error.
    """
    size = x.shape[dim]
    place = target if first is None else target - first
    mine = (place >= 0) & (place < size)
    elsewhere = (target == ignore_index) | ((target >= 0) & (target < classes))
    index = torch.where(mine, place, torch.where(elsewhere, 0, size))
    score = x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    score = score.to(accumulation_dtype(x.dtype))
    return torch.where(mine, score if m is None else score - m, 0)


def _along(vector: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshapes a vector over the classes to broadcast with ``like``."""
    return vector.view([-1 if d == dim else 1 for d in range(like.dim())])


@operator(lambda x, m, *_: m.new_empty(m.shape, dtype=accumulation_dtype(x.dtype)))
def score_sum(x: torch.Tensor, m: torch.Tensor, weight: torch.Tensor | None, dim: int) -> torch.Tensor:
    """u = sum_c weight_c (x_c - m) over ``dim``."""
    terms = minus_max(x, m, dim)
    return (terms if weight is None else terms * _along(weight, x, dim)).sum(dim)


@operator(lambda score, *_: (score.new_empty(score.shape), score.new_empty(score.shape)))
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


def _is_target(target: torch.Tensor, like: list[int], dim: int, first: torch.Tensor | None) -> torch.Tensor:
    """[c = target] for the classes of a shard of shape ``like``."""
    places = torch.arange(like[dim], device=target.device)
    places = places if first is None else places + first
    return places.view([-1 if d == dim else 1 for d in range(len(like))]) == target.unsqueeze(dim)


@operator(lambda grad, hit, slope, x, *_: x.new_empty(x.shape))
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
    """The gradient of x from those of the losses; hit = w[target], slope = k hit + e W, None without smoothing.

    Masks the gradient of ignored samples, which is NaN for a mean over ignored samples only.
    """
    grad = torch.where(target == ignore_index, 0, grad)
    pull = grad * hit * (1 - smoothing) if smoothing else grad * hit
    slope = pull if slope is None else grad * slope
    dx = minus_max(x, m, dim).exp() * (slope / s).unsqueeze(dim)
    dx = dx - torch.where(_is_target(target, list(x.shape), dim, first), pull.unsqueeze(dim), 0)
    if smoothing:
        rest = (grad * (smoothing / classes)).unsqueeze(dim)
        dx = dx - (rest if weight is None else rest * _along(weight, x, dim))
    return dx.to(x.dtype)


def _spread(values: torch.Tensor, target: torch.Tensor, dim: int, classes: int, dtype: torch.dtype, first: object = None) -> torch.Tensor:
    return values.new_empty([*target.shape[:dim], classes, *target.shape[dim:]], dtype=dtype)


@operator(_spread)
def spread_target(
    values: torch.Tensor, target: torch.Tensor, dim: int, classes: int, dtype: torch.dtype, first: torch.Tensor | None = None
) -> torch.Tensor:
    """values [c = target], with a dim of classes c inserted at ``dim``."""
    like = [*target.shape[:dim], classes, *target.shape[dim:]]
    return torch.where(_is_target(target, like, dim, first), values.unsqueeze(dim), 0).to(dtype)
