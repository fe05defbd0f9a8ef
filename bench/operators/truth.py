"""The truth, which is the operator on one device, and the comparison of results with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bench.operators.entries import Sample, Skipped

RTOL = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-5, torch.complex64: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Tolerance relative to the tensor's norm; dtypes without an entry are compared exactly."""


SEEDS = 4
"""The number of runs from different seeds; if one differs, the operator counts as random."""


@dataclass(frozen=True)
class Truth:
    """The flattened results of one device; ``grads``: one per tensor argument, None without a gradient; ``tangents``: one per output.

    ``random``: runs from different seeds differ, so only shapes and dtypes can be compared.
    """

    outputs: list[Any]
    grads: list[torch.Tensor | None]
    tangents: list[torch.Tensor | None]
    random: bool


def truth(sample: Sample, grad: bool) -> Truth:
    """Runs the operator; raises Skipped if it refuses its own sample here."""
    try:
        outputs, grads, tangents = _run(sample, grad, sample.seed)
        again = [_run(sample, False, sample.seed + i)[0] for i in range(1, SEEDS)]
    except Skipped:
        raise
    except Exception as error:
        raise Skipped(f"torch itself raises {type(error).__name__}: {first_line(error)}") from error
    return Truth(outputs, grads, tangents, any(difference(one, outputs) is not None for one in again))


def _run(sample: Sample, grad: bool, seed: int) -> tuple[list[Any], list[Any], list[Any]]:
    torch.manual_seed(seed)
    args, kwargs = sample.fresh(grad)
    with torch.set_grad_enabled(grad):
        outputs = flat(sample.function(*args, **kwargs))
    tangents = tangents_of(outputs, sample.seed) if grad else [None] * len(outputs)
    grads = gradients(outputs, tangents, tensors_of((args, kwargs))) if grad else []
    return [detached(o) for o in outputs], grads, tangents


def flat(tree: Any) -> list[Any]:
    return list(pytree.tree_leaves(tree))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def tangents_of(outputs: Sequence[Any], seed: int) -> list[torch.Tensor | None]:
    """A random tensor for each output that can have a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(o.shape, dtype=o.dtype, generator=generator) if isinstance(o, torch.Tensor) and o.requires_grad else None
        for o in outputs
    ]


def gradients(outputs: Sequence[Any], tangents: Sequence[Any], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of sum(output * tangent), None for an argument without one; raises Skipped if no output can have one."""
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        raise Skipped("no output of this sample can have a gradient")
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [t for _, t in pairs], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def scale_of(tensors: Sequence[Any]) -> float:
    """The joint norm of all tensors: a tensor a million times smaller may consist of the rounding errors of the others."""
    dense = [t.detach() for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided]
    return math.sqrt(sum(float(t.abs().double().norm()) ** 2 for t in dense))


def difference(have: Sequence[Any], want: Sequence[Any], numbers: bool = True, scale: float = 1.0) -> str | None:
    """The first difference as text, or None.

    ``numbers``: compare values too, not only shapes and dtypes; ``scale``: the joint norm, if these are gradients.
    """
    if len(have) != len(want):
        return f"{len(have)} results, not {len(want)}"
    for place, (x, y) in enumerate(zip(have, want, strict=True)):
        said = _one(x, y, numbers, max(scale, 1.0))
        if said is not None:
            return f"result {place} {said}"
    return None


def _one(x: Any, y: Any, numbers: bool, scale: float) -> str | None:
    if not isinstance(y, torch.Tensor):
        same = type(x) is type(y) and (not numbers or x == y or (x != x and y != y))
        return None if same else f"is {str(x)[:60]!r}, not {str(y)[:60]!r}"
    if not isinstance(x, torch.Tensor):
        return f"is a {type(x).__name__}, not a tensor"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"is {tuple(x.shape)} {x.dtype}, not {tuple(y.shape)} {y.dtype}"
    if not numbers or not y.numel():
        return None
    x, y = (t.detach().resolve_conj().resolve_neg() for t in (x, y))
    if y.dtype == torch.complex32:
        x, y = x.to(torch.complex64), y.to(torch.complex64)
    if x.layout != y.layout:
        return f"is {x.layout}, not {y.layout}"
    if y.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    return _values(x, y, scale)


def _values(x: torch.Tensor, y: torch.Tensor, scale: float) -> str | None:
    rtol = RTOL.get(y.dtype)
    if rtol is None:
        return None if torch.equal(x, y) else f"differs in {int((x != y).sum())} of {y.numel()} elements"
    wide = torch.complex128 if y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    finite = torch.isfinite(y)
    odd = ~finite & ~((x == y) | (x.isnan() & y.isnan()))
    if not torch.equal(torch.isfinite(x), finite) or bool(odd.any()):
        return "has other infinities or NaN"
    error, size = float((x[finite] - y[finite]).norm()), float(y[finite].norm())
    return None if error <= rtol * max(size, 1e-6 * scale) else f"is off by {error:.3g}, its norm is {size:.3g}"


def first_line(error: BaseException) -> str:
    """The first line that is not empty, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
