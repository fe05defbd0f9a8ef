"""Models that torch's parallelize_module made parallel, compiled for the backend, on two gloo ranks: as in eager execution, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from tests.distributed.module.test_styles import Decoder
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


TENSOR = {
    "first.up": ColwiseParallel(),
    "first.down": RowwiseParallel(),
    "second.up": ColwiseParallel(),
    "second.down": RowwiseParallel(),
}
ROWS = {
    "first": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    "first.up": ColwiseParallel(),
    "first.down": RowwiseParallel(output_layouts=Shard(0)),
    "second.up": ColwiseParallel(input_layouts=Shard(0)),
    "second.down": RowwiseParallel(),
    "second": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
}
DECODER = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}
SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm[12]": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
VOCABULARY = {**DECODER, "head": ColwiseParallel(use_local_output=False)}


def tokens(mesh: DeviceMesh) -> Tensor:
    return torch.arange(8).reshape(2, 4) * 5 % 16


def rows(mesh: DeviceMesh) -> Tensor:
    return torch.sin(torch.arange(48, dtype=torch.float64)).reshape(6, 8)


def own_rows(mesh: DeviceMesh) -> Tensor:
    return rows(mesh) + mesh.get_local_rank()


def torch_transformer() -> nn.Module:
    return Transformer(ModelArgs(dropout_p=0.0, n_layers=1, vocab_size=16))


def torch_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """The plan of torch's own test of a Transformer."""
    Transformer.parallelize(model, mesh, sequence, local_output_for_attn=False)


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism within FSDP, on a mesh of two axes."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, both["tp"], DECODER)
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])


def hooked(model: nn.Module, mesh: DeviceMesh) -> None:
    """A forward hook that computes on the local tensor of a DTensor."""

    def hook(module: nn.Module, args: Any, out: DTensor) -> DTensor:
        return DTensor.from_local(out.to_local(grad_placements=out.placements) + 2, mesh, out.placements)

    parallelize_module(model, mesh, {**TENSOR, "first.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)})
    model.first.register_forward_hook(hook)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[DeviceMesh], Tensor]]] = {
    "mlp": (Pair, TENSOR, rows),
    "mlp_sharded_by_rows": (Pair, ROWS, own_rows),
    "forward_hook": (Pair, hooked, rows),
    "decoder": (Decoder, DECODER, tokens),
    "decoder_sequence_parallel": (Decoder, SEQUENCE, tokens),
    "decoder_by_blocks": (Decoder, SEQUENCE, tokens),
    "decoder_sharded_logits": (Decoder, VOCABULARY, tokens),
    "fully_sharded_too": (Decoder, fully_sharded, tokens),
    "torch_transformer": (torch_transformer, partial(torch_parallel, sequence=False), tokens),
    "torch_transformer_sequence_parallel": (torch_transformer, partial(torch_parallel, sequence=True), tokens),
}


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(name: str) -> None:
    """Steps of SGD: results, gradients and parameters of the compiled and the eager model are equal."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    make, plan, inputs = CASES[name]
    x = inputs(mesh)
    eager = make().double()
    compiled = copy.deepcopy(eager)
    for model in (eager, compiled):
        plan(model, mesh) if callable(plan) else parallelize_module(model, mesh, plan)
    for part in compiled.layers if name == "decoder_by_blocks" else [compiled]:  # blocks read what eager collectives have not yet made
        part.compile(
            backend="fxshard",
            fullgraph="fully" not in name,
            options={"compiler": "inductor" if name == "mlp_sharded_by_rows" else "eager", "timeout": 60.0},
        )
    steps = [torch.optim.SGD(model.parameters(), 0.1) for model in (eager, compiled)]
    for _ in range(1 if name.startswith("torch") else 2):  # torch's Transformer rounds its logits to float32
        want, have = full(eager(x)), full(compiled(x))
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        for out, step in zip((want, have), steps, strict=True):
            step.zero_grad()
            (out**2).sum().backward()
        for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) == isinstance(q.grad, DTensor)
            torch.testing.assert_close(full(p.grad), full(q.grad), rtol=1e-9, atol=1e-9)
        for step in steps:
            step.step()


found, test_two_ranks = cases_on_ranks(2, {name: partial(same, name) for name in CASES})
