"""Workspace: what a few operators take at once, storage by storage, learned by running them on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode, pytree, storage_key
from fxshard.cost.lives import End, Lives
from fxshard.memory_profile import HeldTensor, StepRun

Given = Sequence[tuple[torch.Tensor, bool]]
"""(tensor, whether nobody else needs it, so that it is free once it was read for the last time)."""


def most_at_once(run: Callable[[], Iterable[torch.Tensor]], given: Given) -> int:
    """Bytes that are alive at most while ``run`` makes its results, which stay, from what is ``given``.

    Counted as ``cost.memory`` counts a program: a storage lives from the operator that makes it to the last one that reads it.
    """
    lives = Lives()
    for tensor, dies in given:
        (lives.make if dies else lives.give)(storage_key(tensor), _held(tensor))
    with _Steps(lives):
        for result in run():
            lives.keep(storage_key(result), End("temporary", ""))
    return lives.profile({}).peak


class _Steps(TorchDispatchMode):
    """Notes what each operator reads and makes. Tensors are kept, so that no two of them share a key."""

    def __init__(self, lives: Lives) -> None:
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
            elif func is torch.ops._c10d_functional.wait_tensor.default:  # it gives what the collective gave
                self.lives.share(key, storage_key(read[0]))
            else:
                self.lives.make(key, _held(tensor))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _held(tensor: torch.Tensor) -> HeldTensor:
    return HeldTensor("", "temporary", tensor.untyped_storage().nbytes(), tuple(tensor.shape), str(tensor.dtype), 0, 0)
