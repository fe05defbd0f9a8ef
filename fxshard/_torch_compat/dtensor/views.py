"""Private names of torch (2.13): the operators that made a view, applied to another tensor.

What would replace it: a public function that gives the chain of views from a tensor's base; AOTAutograd uses these names for results that
are views of each other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def views_are_recorded() -> AbstractContextManager[None]:
    """A context in which every view remembers the operators that made it, rather than sizes, strides and offset."""
    recorded: AbstractContextManager[None] = torch.autograd._force_original_view_tracking(True)
    return recorded


def base_of(view: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which ``view`` is a view for autograd; None if it is none."""
    return view._base if view._is_view() else None


def is_one_of_several(view: torch.Tensor) -> bool:
    """Whether ``view`` was made, with gradients, by an operator that returns several views, as ``chunk`` does."""
    autograd = torch._C._autograd
    return view._is_view() and autograd._get_creation_meta(view) == autograd.CreationMeta.MULTI_OUTPUT_NODE


def viewed_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """What the operators between ``view`` and its base make of another ``base`` of the same shape, also of a DTensor."""
    with views_are_recorded():
        made: torch.Tensor = view._view_func_unsafe(base)
    return made
