"""torch functions that branch in Python on tensor values, rewritten in operators that can be traced.

They replace torch's own in the last attempt at a trace, after torch's could not be captured. Their checks (that two tensors are equal,
that a weight is positive) then run as operators of the graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxshard._torch_compat.fakes import forget_inner_sizes
from fxshard._torch_compat.operators import ctc_loss_of_sequences, ctc_loss_of_tensors
from fxshard.passes.trace.functions.checks import check
from fxshard.passes.trace.functions.covariance import corrcoef, cov


def equal(input: Tensor, other: Tensor) -> Any:
    """Whether all elements are equal, as a number known only at run time."""
    same = (input == other).all() if input.shape == other.shape else torch.zeros((), dtype=torch.bool, device=input.device)
    return same.item()


def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    return torch.isclose(input, other, rtol, atol, equal_nan).all().item()


def narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """A tensor ``start`` becomes an index; negative values count from the end."""
    if not isinstance(start, Tensor):
        return torch.ops.aten.narrow(input, dim, start, length)
    first = torch.where(start < 0, start + input.size(dim), start)
    return input.index_select(dim, first + torch.arange(length, device=input.device))


def combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """The indices do not depend on the data."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(choose(range(input.numel()), r))
    if r == 0:
        return input.new_empty([0])
    return input[torch.tensor(places, dtype=torch.int64).reshape(len(places), r)]


def gaussian_nll_loss(input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:
    """(log v + (x - t)^2 / v) / 2, where v is ``var`` clamped to at least eps, with the gradient of ``var`` unclamped.

    That ``var`` is not negative is checked when the graph runs.
    """
    check(reduction in ("none", "mean", "sum"), f"{reduction} is not valid", ValueError)
    if not isinstance(var, Tensor):
        check(var >= 0, "var has negative entry/entries", ValueError)
        var = var * torch.ones_like(input)
    elif input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape:
        one = input.dim() == var.dim() and [v for x, v in zip(input.shape, var.shape, strict=True) if v != x] == [1]
        check(one, "var is of incorrect size", ValueError)
    check((var >= 0).all(), "var has negative entry/entries")
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """Without ``num_classes``, one more than the largest class.

    The range of the classes is checked when the graph runs. If ``num_classes`` is given and no other function needs a replacement, the
    trace uses torch's fake implementation instead of this one, and a class out of range gives a row of zeros.
    """
    check(input.dtype == torch.int64, "one_hot is only applicable to index tensor of type LongTensor.")
    check(input.numel() > 0 or num_classes > 0, "Can not infer total number of classes from empty tensor.")
    check(num_classes > 0 or num_classes == -1, "Class values must be smaller than num_classes.")
    if input.numel():
        check((input >= 0).all(), "Class values must be non-negative.")
        if num_classes > 0:
            check((input < num_classes).all(), "Class values must be smaller than num_classes.")
    count: Any = num_classes if num_classes > 0 else (input.max() + 1).item()
    return (input.unsqueeze(-1) == torch.arange(count, device=input.device)).to(torch.int64)


def istft(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """The inverse transforms of the frames, windowed and overlap-added, divided by the sum of the squared windows."""
    hop, width = n_fft // 4 if hop_length is None else hop_length, n_fft if win_length is None else win_length
    frames = (input if input.dim() == 3 else input.unsqueeze(0)).transpose(1, 2)
    if window is None:
        window = torch.ones(width, dtype=frames.real.dtype, device=input.device)
    left = (n_fft - width) // 2
    window = F.pad(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else None
    if return_complex:
        frames = torch.fft.ifft(frames, dim=-1, norm=norm)
    else:
        half = frames[..., : n_fft // 2 + 1] if onesided is False or (onesided is None and frames.shape[-1] == n_fft) else frames
        frames = torch.fft.irfft(half, n_fft, dim=-1, norm=norm)
    size = n_fft + hop * (frames.shape[1] - 1)
    signal = _overlap(frames * window, size, n_fft, hop)
    weight = _overlap(window.pow(2).expand(1, frames.shape[1], n_fft), size, n_fft, hop)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else size - n_fft // 2 if center else size
    signal, weight = signal[:, start:end], weight[:, start:end]
    check((weight.abs() > 1e-11).all(), "istft: the windows overlap to zero")
    signal = signal / weight
    if end > size:
        signal = F.pad(signal, (0, end - size))
    return signal if input.dim() == 3 else signal.squeeze(0)


def _overlap(frames: Tensor, size: int, n_fft: int, hop: int) -> Tensor:
    return torch.ops.aten.unfold_backward(frames, [frames.shape[0], size], 1, n_fft, hop)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The losses of the sequences; for the mean, each is divided by its target's length."""
    overload = ctc_loss_of_tensors if isinstance(target_lengths, Tensor) else ctc_loss_of_sequences
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    losses = overload(batched, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0, losses)
    if reduction == "mean":
        lengths = torch.as_tensor(target_lengths).clamp(min=1)
        return (losses / lengths).mean()
    return losses.sum() if reduction == "sum" else losses if log_probs.dim() == 3 else losses.squeeze(0)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Computes the running statistics itself if the momentum is known only at run time (1 / number of batches, for a module with
    momentum None)."""
    if not isinstance(momentum, torch.SymFloat) or running_mean is None or running_var is None:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, False)
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = torch.batch_norm(input, weight, bias, mean, var, True, 1.0, eps, False)
    for running, one in ((running_mean, mean), (running_var, var)):
        running.mul_(1 - momentum).add_(one * momentum)
    return result


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
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
    torch.istft: istft,
    Tensor.istft: istft,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.one_hot: one_hot,
    F.ctc_loss: ctc_loss,
    F.batch_norm: batch_norm,
}


class DataDependentMode(TorchFunctionMode):
    """Calls the replacements in ``REPLACEMENTS`` instead of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        with self:  # a replacement may call another replaced function
            result = replacement(*args, **(kwargs or {}))
        forget_inner_sizes((args, kwargs), result)
        return result
