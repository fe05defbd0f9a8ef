"""Private names of torch (2.13): gives a parameter the contents of another tensor, while it stays the same object with its hooks.

What would replace it: a ``torch.utils.swap_tensors`` that leaves hooks and attributes with the object, and recurrent modules without weak
references to their weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def take_contents(parameter: nn.Parameter, new: nn.Parameter) -> None:
    """Gives ``parameter`` the contents of ``new``, which nobody else holds. What the user has hung on ``parameter`` stays with it: hooks
    (``register_hook``, ``register_post_accumulate_grad_hook``), which torch would leave with the old contents, and attributes."""
    held: Any = parameter
    before_adding, after_adding = held._backward_hooks, held._post_accumulate_grad_hooks
    torch.utils.swap_tensors(parameter, new)
    vars(parameter).update(vars(new))
    if before_adding is not None:
        held._backward_hooks = before_adding
    if after_adding is not None:
        held._post_accumulate_grad_hooks = after_adding


def holder_of(parameter: nn.Parameter) -> str | None:
    """What keeps ``parameter`` from taking other contents, as ``torch.utils.swap_tensors`` has it; None if nothing does."""
    if weakref.getweakrefs(parameter):
        return "a weak reference (weakref.ref, WeakSet, WeakKeyDictionary)"
    if _uses(parameter) == 1 or (_uses(parameter) == 2 and _has_accumulator(parameter)):
        return None
    return "a graph of autograd (a result that was computed from it)"


def _uses(parameter: nn.Parameter) -> int:
    held: Any = parameter
    return int(held._use_count())


def _has_accumulator(parameter: nn.Parameter) -> bool:
    """Whether the second use is the node that adds up its gradient, which a graph that was backpropagated may have left."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node  # made now, and a use, if there is none
    return node is not None and _uses(parameter) == 2


@contextlib.contextmanager
def without_flat_weights(model: nn.Module) -> Iterator[None]:
    """A context in which recurrent modules have no weak references to their weights, as in their ``_apply``; afterwards to those that they
    have then."""
    found: list[Any] = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in found:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in found:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]
