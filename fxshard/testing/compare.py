"""Comparison with one device: the eager model is the reference."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard.runtime.simulate.simulate import Simulation


@dataclass(frozen=True)
class Reference:
    """Outputs, gradients by parameter name, and buffers after one step on one device; ``changed``: the buffers that were written."""

    outputs: Any
    grads: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    changed: frozenset[str] = frozenset()


def one_device(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, train: bool = True) -> Reference:
    """Runs a copy of ``model`` eagerly; gradients are those of the sum of all differentiable outputs (tangents of ones)."""
    model = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.set_grad_enabled(train):
        outputs = model(*args, **dict(kwargs or {}))
    if train:
        leaves = [o for o in pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
        torch.autograd.backward(leaves, [torch.ones_like(o) for o in leaves])
    grads = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    changed = frozenset(name for name, value in before.items() if not torch.equal(value, buffers[name]))
    return Reference(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), grads, buffers, changed)


def assert_equal_to_one_device(result: Simulation, reference: Reference, rtol: float = 1e-9) -> None:
    """Law 1: |x - ref| <= rtol max(|ref|, 1e-6 x the norm of all gradients), Frobenius norm, for each tensor."""
    scale = 1e-6 * math.sqrt(sum(float(g.double().norm()) ** 2 for g in reference.grads.values()))
    pairs = [(f"output {i}", x, y) for i, (x, y) in enumerate(zip(_tensors(result.outputs), _tensors(reference.outputs), strict=True))]
    missing = set(reference.grads) - set(result.grads)
    assert not missing, f"no gradient for {sorted(missing)}"
    lost = reference.changed - set(result.mutations)
    assert not lost, f"no new value for buffers {sorted(lost)}"
    pairs += [(f"gradient of {name}", result.grads[name], grad) for name, grad in reference.grads.items()]
    pairs += [(f"buffer {name}", value, reference.buffers[name]) for name, value in result.mutations.items()]
    for what, value, want in pairs:
        assert value.shape == want.shape, f"{what} has shape {tuple(value.shape)}, not {tuple(want.shape)}"
        error, size = float((value.double() - want.double()).norm()), float(want.double().norm())
        assert error <= rtol * max(size, scale), f"{what} is off by {error:.3g}, its norm is {size:.3g}"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
