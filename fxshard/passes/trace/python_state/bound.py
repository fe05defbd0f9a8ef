"""Arguments that Dynamo does not accept as inputs of a graph: they become constants of the captured model."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree


class Bound(nn.Module):
    """A model with the arguments bound that Dynamo does not accept as inputs (slices, options, modules); it takes the others."""

    def __init__(self, model: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.bound = [leaf if is_bound(leaf) else None for leaf in leaves]
        self.free = [i for i, leaf in enumerate(leaves) if not is_bound(leaf)]

    def forward(self, *free: Any, **taps: Any) -> Any:
        leaves = list(self.bound)
        for place, value in zip(self.free, free, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.model(*args, **kwargs, **taps)


INPUTS = (torch.Tensor, int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of arguments that Dynamo accepts as inputs of a graph."""


def is_bound(leaf: Any) -> bool:
    return not isinstance(leaf, INPUTS) or isinstance(leaf, enum.Enum)
