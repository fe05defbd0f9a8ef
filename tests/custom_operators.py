"""Custom operators as users write them: a gate with its own backward, and one that needs the offset of its shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fxshard

GATE = ("tests::gate", "b s h, h -> b s h")
GATE_BACKWARD = ("tests::gate_backward", "b s h, b s h, h -> b s h, h")


@torch.library.custom_op("tests::gate", mutates_args=())
def gate(x: Tensor, scale: Tensor) -> Tensor:
    """sigmoid(x) scale; x [b, s, h], scale [h]."""
    return torch.sigmoid(x) * scale


@torch.library.custom_op("tests::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return grad * scale * s * (1 - s), (grad * s).sum((0, 1))


gate.register_fake(lambda x, scale: torch.empty_like(x))
gate_backward.register_fake(lambda grad, x, scale: (torch.empty_like(x), torch.empty_like(scale)))
gate.register_autograd(
    lambda ctx, grad: gate_backward(grad.contiguous(), *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("tests::ramp", mutates_args=())
def ramp(x: Tensor) -> Tensor:
    """x[i, j] * j."""
    return x * torch.arange(x.shape[1], dtype=x.dtype)


ramp.register_fake(lambda x: torch.empty_like(x))


def local_ramp(ctx: Any) -> Any:
    """The local form: the columns of a rank begin at a run-time offset."""
    columns = ctx.emit(torch.ops.aten.arange.default, ctx.input_shape(0)[1], dtype=ctx.call.operands[0].dtype)
    return ctx.emit(torch.ops.aten.mul.Tensor, ctx.args[0], ctx.emit(torch.ops.aten.add.Tensor, columns, ctx.input_offset(0, 1)))


class Gated(nn.Module):
    """Two linear layers with the gate between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.rand(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gate(self.up(x), self.scale))


def register_gate() -> None:
    fxshard.register_rule(*GATE)
    fxshard.register_rule(*GATE_BACKWARD)
