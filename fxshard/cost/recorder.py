"""MemoryRecorder: tracks the storages of real or fake tensors while operators run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fxshard._torch_compat import TorchDispatchMode, pytree
from fxshard._torch_compat.fakes import storage_key


class MemoryRecorder(TorchDispatchMode):
    """Tracks storages from creation to death: ``alive`` bytes now, ``peak`` bytes, ``peak_op`` the operator at the peak.

    Views count once. ``given`` tensors exist from the start. Temporary buffers inside kernels are not seen, nor tensors that
    no operator makes.
    """

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.peak_op = "start"
        self._sizes: dict[int, int] = {}
        self.follow(*given)

    def follow(self, *tensors: torch.Tensor, op: str = "given") -> None:
        """Tracks the storages of ``tensors`` from now on."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            key, storage = storage_key(tensor), tensor.untyped_storage()
            if key not in self._sizes:
                # torch keeps the Python object of a storage alive as long as the storage itself.
                weakref.finalize(storage, self._died, key).atexit = False
            self.alive += storage.nbytes() - self._sizes.get(key, 0)
            self._sizes[key] = storage.nbytes()
        if self.alive > self.peak:
            self.peak, self.peak_op = self.alive, op

    def _died(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.follow(*(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)), op=str(func))
        return result
