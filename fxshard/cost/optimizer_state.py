"""What an optimiser keeps for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxshard.errors import OptionError, closest

OPTIMIZERS: Mapping[str, int] = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2}
"""Optimisers by the tensors that each keeps for a parameter, of the parameter's size (AdamW is as Adam)."""


@dataclass(frozen=True)
class Optimizer:
    """What an optimiser keeps: ``kind`` of ``OPTIMIZERS``; its state in ``state_dtype`` (None: the parameter's); with
    ``master_weights`` a copy in float32 of each parameter that is of another dtype."""

    kind: str = "none"
    state_dtype: torch.dtype | None = None
    master_weights: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            what = f"unknown optimizer {self.kind!r}{closest(self.kind, OPTIMIZERS)}"
            raise OptionError(what, where="optimizer", remedy=f"use one of {', '.join(OPTIMIZERS)}")

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """Bytes of state for each element of a parameter of ``dtype``."""
        master = 4 if self.master_weights and dtype != torch.float32 else 0
        return OPTIMIZERS[self.kind] * (self.state_dtype or dtype).itemsize + master
