"""Private names of torch (2.13): gives a parameter the contents of another tensor, while it stays the same object with its hooks.

What would replace it: a ``torch.utils.swap_tensors`` that leaves hooks and attributes with the object.
"""

from __future__ import annotations

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
