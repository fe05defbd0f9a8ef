"""``torch.cov`` and ``torch.corrcoef`` in operators that can be traced: torch's own branch on the values of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxshard.passes.trace.functions.checks import check


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """(x - mean) w (x - mean)^H / norm, where norm is the sum of the weights minus the correction, at least 0.

    The signs and the sum of the weights are checked when the graph runs. Torch's warning for a norm that is not positive is
    not given.
    """
    _check_dims("cov", input)
    check(input.dtype != torch.bool, "cov(): bool dtype is not supported for input")
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        norm: Any = max(x.shape[1] - correction, 0)
        centred = x - x.mean(1, keepdim=True)
        return (centred @ centred.mH / norm).squeeze()
    if fweights is not None:
        whole = not fweights.is_floating_point() and not fweights.is_complex()
        _check_weights("fweights", fweights, x.shape[1], whole, "integral")
    if aweights is not None:
        _check_weights("aweights", aweights, x.shape[1], aweights.is_floating_point(), "floating point")
    w: Any = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total = w.sum()
    check(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (x * w).sum(1, keepdim=True) / total
    if aweights is None:
        norm = total - correction
    else:
        norm = total - correction * (w * aweights).sum() / total
    centred = x - mean
    return ((centred * w) @ centred.mH / norm.clamp(min=0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Covariances divided by both standard deviations, clipped to [-1, 1]."""
    _check_dims("corrcoef", input)
    c = cov(input)
    if c.dim() == 0:
        return c / c
    deviation = c.diagonal().real.sqrt()
    c = c / deviation.unsqueeze(-1) / deviation.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def _check_dims(function: str, input: Tensor) -> None:
    dims = input.dim()
    check(dims <= 2, f"{function}(): expected input to have two or fewer dimensions but got an input with {dims} dimensions")


def _check_weights(name: str, weights: Tensor, count: int, is_kind: bool, kind: str) -> None:
    dims, numel = weights.dim(), weights.numel()
    check(dims <= 1, f"cov(): expected {name} to have one or fewer dimensions but got {name} with {dims} dimensions")
    check(is_kind, f"cov(): expected {name} to have {kind} dtype but got {name} with {weights.dtype} dtype")
    said = f"cov(): expected {name} to have the same numel as there are observations in the input but got {numel} != {count}"
    check(numel == count, said)
    check((weights >= 0).all(), f"cov(): {name} cannot be negative")
