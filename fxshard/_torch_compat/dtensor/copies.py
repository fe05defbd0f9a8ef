"""Private names of torch (2.13): deep copies of DTensors whose local tensors are slices of larger buffers, like gradients in buckets.

What would replace it: ``copy.deepcopy`` of such DTensors, which fails in torch 2.13.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor


@functools.cache
def copy_slices() -> None:
    """From now on ``copy.deepcopy`` supports such DTensors; torch's own assumes that each tensor owns its storage."""
    plain = DTensor.__deepcopy__

    @functools.wraps(plain)
    def deepcopied(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not self.is_leaf or not self.storage_offset():
            return plain(self, memo)
        with torch.no_grad():
            made = self.detach().clone()
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        made.grad = copy.deepcopy(self.grad, memo)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    DTensor.__deepcopy__ = deepcopied
