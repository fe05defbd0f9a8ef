"""The Llama in Megatron's layouts as one writes it by hand: local layers, and a collective at each border (Shoeybi et al. 2019, section 3).

The layouts are those of ``Family.styles``: the embedding is sharded by the width, and what it and the last layer give is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.training.families import CannotRun
from bench.training.peers import Contestant, Setting, stepping

KV_HEADS = 4
"""Heads of keys and values of ``model.llama``."""

PARTS = ("attention", "feed_forward")
"""The parts of a block that begin with layers sharded by outputs, and end with one sharded by inputs."""


class Copy(torch.autograd.Function):
    """f of the paper: the same tensor; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(grads[0].contiguous(), "sum", ctx.mesh)), None


class Reduce(torch.autograd.Function):
    """g of the paper: the sum over the ranks; the gradient is the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """The parts of the ranks side by side in the last dim; the gradient is that of the own part, since all ranks go on with the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return collectives.wait_tensor(collectives.all_gather_tensor(x.contiguous(), x.dim() - 1, mesh))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.mesh.size(), -1)[ctx.mesh.get_local_rank()].contiguous(), None


class Part(nn.Module):
    """Attention or the feed-forward layers of a block on this rank's heads or columns."""

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner, self.mesh = inner, mesh

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        result: Tensor = Reduce.apply(self.inner(Copy.apply(x, self.mesh), *rest), self.mesh)
        return result


class Side(nn.Module):
    """The embedding or the last layer on this rank's columns, gathered."""

    def __init__(self, inner: nn.Module, mesh: DeviceMesh, before: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.inner, self.mesh, self.before = inner, mesh, before

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.before is None else self.before(x, self.mesh)
        result: Tensor = Gather.apply(self.inner(x), self.mesh)
        return result


def megatron(setting: Setting, compiled: bool) -> Contestant:
    """The step of the Llama. Raises CannotRun for other models, and where the ranks do not divide the heads of keys and values."""
    if setting.name != "llama" or KV_HEADS % setting.mesh.size():
        raise CannotRun(f"written for a Llama of which {KV_HEADS} heads of keys and values are divided evenly")
    model, mesh = setting.model, setting.mesh
    for layer in model.get_submodule(setting.family.blocks):
        for name in setting.family.columns:
            _keep(layer.get_submodule(name), 0, mesh)
        for name in setting.family.rows:
            _keep(layer.get_submodule(name), 1, mesh)
        for name in PARTS:
            setattr(layer, name, Part(getattr(layer, name), mesh))
    embedding, output = model.get_submodule("tok_embeddings"), model.get_submodule("output")
    _keep(embedding, 1, mesh)
    _keep(output, 0, mesh)
    model.tok_embeddings, model.output = Side(embedding, mesh, None), Side(output, mesh, Copy.apply)
    return Contestant(stepping(model, setting.batch, compiled))


def _keep(layer: Any, dim: int, mesh: DeviceMesh) -> None:
    """Cuts the layer's weight to this rank's part along ``dim``."""
    layer.weight = nn.Parameter(layer.weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone())


BY_HAND: dict[str, Callable[[Setting], Contestant]] = {
    "by hand, Megatron's layouts, eager": lambda s: megatron(s, False),
    "by hand, Megatron's layouts, compiled": lambda s: megatron(s, True),
}
"""Hand-written local code, in the order of the table."""
