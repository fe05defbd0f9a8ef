"""torch functions that look at data to decide something in Python, spelled out in operators that stay in a graph.

They are replaced on the second try of a trace, after torch's own could not be captured: what they check (that two tensors
are equal, that a weight is positive) is then computed, not decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def equal(input: Tensor, other: Tensor) -> Any:
    """Whether all elements are equal, as a number that only running tells."""
    return bool(input.shape == other.shape) and (input == other).all().item()


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


def narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """A start that is a tensor is an index; negative ones count from the end."""
    if not isinstance(start, Tensor):
        return torch.ops.aten.narrow(input, dim, start, length)
    first = torch.where(start < 0, start + input.size(dim), start)
    return input.index_select(dim, first + torch.arange(length, device=input.device))


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """The places are known without the data."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(choose(range(input.numel()), r))
    if r == 0:
        return input.new_empty([0])
    return input[torch.tensor(places, dtype=torch.int64).reshape(len(places), r)]


def cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """(x - mean) w (x - mean)^H / norm, where norm is the sum of weights less the correction, and at least 0."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        norm: Any = max(x.shape[1] - correction, 0)
        centred = x - x.mean(1, keepdim=True)
        return (centred @ centred.mH / norm).squeeze()
    w = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    assert w is not None
    total = w.sum()
    mean = (x * w).sum(1, keepdim=True) / total
    if aweights is None:
        norm = total - correction
    else:
        norm = total - correction * (w * aweights).sum() / total
    centred = x - mean
    return ((centred * w) @ centred.mH / norm.clamp(min=0)).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """Covariances over the deviations of both, between -1 and 1."""
    c = cov(input)
    if c.dim() == 0:
        return c / c
    deviation = c.diagonal().real.sqrt()
    c = c / deviation.unsqueeze(-1) / deviation.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


SPELLED: dict[Any, Callable[..., Any]] = {
    torch.equal: equal,
    Tensor.equal: equal,
    torch.allclose: allclose,
    Tensor.allclose: allclose,
    torch.narrow: narrow,
    Tensor.narrow: narrow,
    torch.combinations: combinations,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}


class Spelled(TorchFunctionMode):
    """Calls what ``SPELLED`` has in the place of torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        spelled = SPELLED.get(func)
        if spelled is not None:
            with self:  # a spelled function may call another
                return spelled(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
