"""Workspace: the peak memory of a few operators, found by running them on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode, pytree
from fxshard._torch_compat.fakes import storage_key
from fxshard.cost.liveness import BoundaryValue, Liveness
from fxshard.memory_profile import HeldTensor, StepRun

Given = Sequence[tuple[torch.Tensor, bool]]
"""(tensor, whether it may be freed after its last read, because nothing else needs it)."""


def peak_bytes(run: Callable[[], Iterable[torch.Tensor]], given: Given) -> int:
    """Peak bytes alive while ``run`` computes its results from the ``given`` tensors; results live to the end.

    Liveness as in ``cost.memory``: a storage lives from the operator that makes it to the last one that reads it.
    """
    lives = Liveness()
    for tensor, dies in given:
        (lives.make if dies else lives.add_input)(storage_key(tensor), _held(tensor))
    with _StepRecorder(lives):
        for result in run():
            lives.mark_result(storage_key(result), BoundaryValue("temporary", ""))
    return lives.profile({}).peak


class _StepRecorder(TorchDispatchMode):
    """Records what each operator reads and makes. Holds all tensors, since storage keys are unique only among living tensors."""

    def __init__(self, lives: Liveness) -> None:
        super().__init__()
        self.lives = lives
        self.seen: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = _tensors((args, kwargs)), _tensors(result)
        self.seen += [*read, *made]
        self.lives.step(StepRun(str(func), str(func)))
        for tensor in read:
            self.lives.read(storage_key(tensor))
        for tensor in made:
            key = storage_key(tensor)
            if key in self.lives:
                self.lives.read(key)
            elif func is torch.ops._c10d_functional.wait_tensor.default:  # it returns the collective's buffer
                self.lives.alias(key, storage_key(read[0]))
            else:
                self.lives.make(key, _held(tensor))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _held(tensor: torch.Tensor) -> HeldTensor:
    return HeldTensor("", "temporary", tensor.untyped_storage().nbytes(), tuple(tensor.shape), str(tensor.dtype), 0, 0)
