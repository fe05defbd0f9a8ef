"""``torch.amp.GradScaler`` on DTensors: all ranks skip a step, or none does.

A scaler unscales an optimiser's gradients and looks for infinite or NaN entries, with one operator on lists of gradients. For DTensors,
torch 2.13 reduces the result over the axes on which the *first* gradient of a list is sharded. If that one is replicated, or sharded on
another axis than the gradient that overflows, some ranks skip the step and halve their scale and others do not, and their parameters differ
from then on. Lists that mix plain tensors and DTensors are refused. After ``agree_on_overflows`` the operator reduces over each axis on
which some gradient of the list is sharded or pending.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fxshard._torch_compat.dtensor.shards import OVERFLOW_CHECK, handle_dtensors
from fxshard.runtime.ranks.watchdog import watching


@functools.cache
def agree_on_overflows() -> None:
    """Makes gradient scalers find an overflow in one rank's shards on all ranks, in this process from now on."""
    handle_dtensors(OVERFLOW_CHECK, _check_and_unscale)


def _check_and_unscale(op: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Multiplies ``grads`` by ``inverse`` in place; sets ``found``, a float32 scalar, to 1 on all ranks if any entry is not finite."""
    grads, found, inverse = args
    op([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], found, inverse)
    agree_on(found, grads, "infinite")


def agree_on(found: Tensor, grads: Sequence[Tensor], what: str) -> None:
    """The maximum of ``found`` over all ranks that hold different parts of some gradient, in place; ``what`` a gradient may be."""
    axes = dict.fromkeys(  # in the same order on all ranks
        (grad.device_mesh, axis)
        for grad in grads
        if isinstance(grad, DTensor)
        for axis, placement in enumerate(grad.placements)
        if not isinstance(placement, Replicate) and grad.device_mesh.size(axis) > 1
    )
    for mesh, axis in axes:
        group = mesh.get_group(axis)
        with watching(f"tell each other whether a gradient is {what}", group):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
