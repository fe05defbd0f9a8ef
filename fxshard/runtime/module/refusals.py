"""Refuses operations on modules that a parallelized module does not support, and says what to do instead."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.calls import jit_traced, transformed
from fxshard.errors import RunError

COMPILED = "a parallelized module is compiled already, for one rank; fxshard.export(model, args, mesh) exports a model, before parallelize"
"""The reason that Dynamo gives when ``torch.export`` wants to trace the module."""


class CodeError(RunError, AttributeError):
    """Raised for the Python code of a parallelized ``forward``, which has none; an AttributeError, so that ``hasattr`` returns False."""


def check_surroundings() -> None:
    """Raises RunError for a call under a transform of torch.func or under tracing: neither can see into a compiled program."""
    if transformed():
        what = "a parallelized module is called within a transform of torch.func, or for forward-mode derivatives"
        remedy = "transform inside of the forward of the parallelized module, or take gradients by backward() and torch.autograd.grad"
        raise RunError(what, remedy=remedy)
    if jit_traced():
        raise RunError("a parallelized module cannot be traced by torch.jit.trace", remedy=_EXPORT)


def refuse_code(name: str) -> NoReturn:
    """Raises CodeError: ``torch.export`` and ``torch.jit.script`` look for the attribute ``name`` of a function, its code."""
    raise CodeError(f"a parallelized module has compiled programs in place of Python code ({name}), and cannot be exported", remedy=_EXPORT)


def refuse_pickle() -> NoReturn:
    raise RunError("a parallelized module cannot be pickled", remedy="save its state_dict(), or save it with fxshard.save_checkpoint")


@functools.cache
def refuse_shared_memory() -> None:
    """From now on, in this process, ``share_memory_`` of a DTensor on the CPU raises RunError; in torch 2.13 it is a segmentation fault."""

    def share_memory_(self: DTensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.Tensor.share_memory_(self)
        what = "share_memory of a parallelized module, whose parameters are DTensors: they have no memory, only their shards do"
        raise RunError(what, remedy="share the shards of this rank: for p in model.parameters(): p.to_local().share_memory_()")

    DTensor.share_memory_ = share_memory_


_EXPORT = "export the model before it is parallelized: fxshard.export(model, args, mesh)"
