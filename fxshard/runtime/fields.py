"""What ranks tell each other of their arguments and weights before the first collective: fields for ``launch.compare``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from fxshard.layout import Layout
from fxshard.runtime.launch import checksum

SAMPLE = 64
"""Elements of each parameter and buffer that ranks compare: cheap, and enough to tell ranks that were seeded differently."""

Fields = dict[str, str]


def shape_fields(named: Mapping[str, torch.Tensor]) -> Fields:
    """Global shape and dtype; the layout too of a DTensor."""
    layouts = {name: f" {Layout(value.placements)}" for name, value in named.items() if isinstance(value, DTensor)}
    return {f"shape: {name}": f"{tuple(value.shape)} {value.dtype}{layouts.get(name, '')}" for name, value in named.items()}


def value_field(name: str, value: torch.Tensor) -> Fields:
    """A plain tensor is the same on each rank; nothing of a DTensor, whose shards differ."""
    return {} if isinstance(value, DTensor) else {f"value: {name}": f"checksum {checksum(value)}"}


def weight_fields(named: Mapping[str, torch.Tensor]) -> Fields:
    """A sample of each plain parameter or buffer."""
    plain = {name: value.detach() for name, value in named.items() if not isinstance(value, DTensor)}
    return {f"weights: {name}": f"checksum {checksum(value.flatten()[:SAMPLE])}" for name, value in plain.items()}
