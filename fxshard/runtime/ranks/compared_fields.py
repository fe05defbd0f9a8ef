"""The fields of arguments and weights that ranks compare before the first collective, for ``launch.compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import as_mesh
from fxshard.runtime.ranks.debug import debugging
from fxshard.runtime.ranks.launch import checksum, compare, mesh_ranks
from fxshard.strategies.engine.user_rules import all_user_rules

SAMPLE = 256
"""Elements compared of each parameter and buffer, evenly spaced: cheap, and enough to detect other seeds or files."""

Fields = dict[str, str]


def rule_fields() -> Fields:
    """The user's rules, registered with fxshard or with torch's ``register_sharding``."""
    return {f"rule: {op}": text for op, text in all_user_rules().items()}


def mesh_fields(device_mesh: DeviceMesh) -> Fields:
    """Axes, sizes, and the ranks along them."""
    return {"mesh": f"{as_mesh(device_mesh)}, ranks {device_mesh.mesh.tolist()}"}


def debug_field(chosen: bool) -> Fields:
    """Debug mode, which all ranks must use together."""
    return {"debug mode": str(debugging(chosen))}


def shape_fields(named: Mapping[str, torch.Tensor]) -> Fields:
    """Global shape and dtype; for a DTensor also the layout."""
    layouts = {name: f" {Layout(value.placements)}" for name, value in named.items() if isinstance(value, DTensor)}
    return {f"shape: {name}": f"{tuple(value.shape)} {value.dtype}{layouts.get(name, '')}" for name, value in named.items()}


def value_field(name: str, value: torch.Tensor) -> Fields:
    """A checksum of a plain tensor; nothing for a DTensor, since its shards differ."""
    return {} if isinstance(value, DTensor) else {f"value: {name}": f"checksum {checksum(value)}"}


def weight_fields(named: Mapping[str, torch.Tensor]) -> Fields:
    """A checksum of a sample of each plain parameter or buffer."""
    plain = {name: value.detach() for name, value in named.items() if not isinstance(value, DTensor)}
    return {f"weights: {name}": f"checksum {checksum(_sample(value))}" for name, value in plain.items()}


def _sample(value: torch.Tensor) -> torch.Tensor:
    """The first and last elements, and others evenly spaced in between."""
    if value.numel() <= SAMPLE or value.is_meta:
        return value
    places = torch.linspace(0, value.numel() - 1, SAMPLE, dtype=torch.float64).long().to(value.device)
    return value.reshape(-1).index_select(0, places)


def draw_seed() -> torch.Tensor:
    """The seed for a call's random numbers."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


class SeedWatch:
    """Checks that ranks draw equal seeds at calls 1, 2, 4, 8, ...: a generator that one rank uses alone differs from then on."""

    def __init__(self, device_mesh: DeviceMesh, timeout: float) -> None:
        self.ranks, self.timeout, self.calls = mesh_ranks(device_mesh), timeout, 0

    def __call__(self, seeds: Sequence[torch.Tensor]) -> None:
        """Raises RunError on all ranks if a comparison is due and the seeds differ."""
        self.calls += 1
        if seeds and self.calls & (self.calls - 1) == 0:
            compare({"rng_seed": " ".join(str(int(seed)) for seed in seeds)}, ranks=self.ranks, timeout=self.timeout)
