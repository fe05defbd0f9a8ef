"""torch's own ways to run the step: ``PEERS[name](setting)`` gives a ``Contestant``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bench.training.families import FAMILIES, Family
from bench.training.model import BATCH


@dataclass(frozen=True)
class Setting:
    """The width of the model, the length of a sequence, the mesh of one axis, the hardware for which fxshard plans (a preset, a file, or
    None: by the device's name), the dtype of the weights, the rows of the whole batch, the model's name in ``FAMILIES``, its layers."""

    width: int
    length: int
    mesh: DeviceMesh
    hardware: str | None = "cpu"
    dtype: torch.dtype = torch.float32
    rows: int = BATCH
    name: str = "llama"
    layers: int = 4

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @property
    def model(self) -> nn.Module:
        """A new model, the same on each rank, on the mesh's kind of device."""
        return self.family.make(self.width, self.length, self.layers).to(self.mesh.device_type, self.dtype)

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the whole batch; inputs that are no tokens have the weights' dtype."""
        inputs, targets = (x.to(self.mesh.device_type) for x in self.family.batch(self.length, self.rows))
        return (inputs.to(self.dtype) if inputs.is_floating_point() else inputs), targets


@dataclass(frozen=True)
class Contestant:
    """``step()`` runs forward, backward and SGD, and returns the loss of this rank's part of the batch; ``detail``: the program whose plan
    ``--details`` prints, if there is one; ``held``: this rank's tensors of the model."""

    step: Callable[[], Tensor]
    detail: Any = None
    held: tuple[Tensor, ...] = ()


def stepping(model: nn.Module, inputs: tuple[Any, ...], compiled: bool = False) -> Callable[[], Tensor]:
    """Sizes are static: ways that share the model's code but not the batch's size would make Dynamo compile for any size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    called: Callable[..., Tensor] = torch.compile(model, dynamic=False) if compiled else model

    def step() -> Tensor:
        loss = called(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mine(setting: Setting) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch."""
    tokens, targets = setting.batch
    ranks, rank = setting.mesh.size(), setting.mesh.get_local_rank()
    return tokens.chunk(ranks)[rank].contiguous(), targets.chunk(ranks)[rank].contiguous()


def tensor_parallel(setting: Setting, compiled: bool) -> Contestant:
    """Megatron's layouts by ``parallelize_module``."""
    model = parallelize_module(setting.model, setting.mesh, setting.family.styles())
    return Contestant(stepping(model, setting.batch, compiled))


def fsdp(setting: Setting, compiled: bool) -> Contestant:
    """``fully_shard`` of each layer, compiled layer by layer as torch's own trainers do."""
    model = setting.model
    for layer in model.get_submodule(setting.family.blocks):
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, mesh=setting.mesh)
    fully_shard(model, mesh=setting.mesh)
    return Contestant(stepping(model, mine(setting)))


def fsdp_whole(setting: Setting, compiled: bool) -> Contestant:
    """``fully_shard`` of each layer, the whole model compiled at once."""
    model = setting.model
    for layer in model.get_submodule(setting.family.blocks):
        fully_shard(layer, mesh=setting.mesh)
    fully_shard(model, mesh=setting.mesh)
    return Contestant(stepping(model, mine(setting), compiled))


def ddp(setting: Setting, compiled: bool) -> Contestant:
    model = DistributedDataParallel(setting.model, process_group=setting.mesh.get_group())
    return Contestant(stepping(model, mine(setting), compiled))


def alone(setting: Setting, compiled: bool) -> Contestant:
    """The whole batch on one device; both ranks do this at the same time."""
    return Contestant(stepping(setting.model, setting.batch, compiled))


PEERS: dict[str, Callable[[Setting], Contestant]] = {
    "parallelize_module, eager": lambda s: tensor_parallel(s, False),
    "parallelize_module, compiled": lambda s: tensor_parallel(s, True),
    "FSDP2, eager": lambda s: fsdp(s, False),
    "FSDP2, compiled": lambda s: fsdp(s, True),
    "FSDP2, compiled whole": lambda s: fsdp_whole(s, True),
    "DDP, eager": lambda s: ddp(s, False),
    "DDP, compiled": lambda s: ddp(s, True),
    "one device, compiled": lambda s: alone(s, True),
}
"""torch's ways, in the order of the table."""
