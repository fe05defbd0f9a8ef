"""An operator of your own in a sharded model, with its backward, shapes and rules; then a plan, checked in one process.

python examples/custom_operator.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxshard


@torch.library.custom_op("example::gate", mutates_args=())
def gate(x: Tensor, scale: Tensor) -> Tensor:
    """sigmoid(x) * scale, for x [batch, length, hidden] and scale [hidden]. It stands for a kernel of yours."""
    return torch.sigmoid(x) * scale


@torch.library.custom_op("example::gate_backward", mutates_args=())
def gate_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of scale."""
    s = torch.sigmoid(x)
    return grad * scale * s * (1 - s), (grad * s).sum((0, 1))


# torch needs the shapes of results, which planning uses, and the backward.
gate.register_fake(lambda x, scale: torch.empty_like(x))
gate_backward.register_fake(lambda grad, x, scale: (torch.empty_like(x), torch.empty_like(scale)))
gate.register_autograd(
    lambda ctx, grad: gate_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# fxshard needs to know which dims are sharded together. If a letter that the result lacks is sharded, as for scale's gradient, ranks hold
# partial sums.
fxshard.register_rule("example::gate", "b s h, h -> b s h")
fxshard.register_rule("example::gate_backward", "b s h, b s h, h -> b s h, h")


class Gated(nn.Module):
    def __init__(self, dim: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.rand(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gate(self.up(x), self.scale))


def main() -> None:
    torch.manual_seed(0)
    model, x = Gated().double(), torch.randn(8, 4, 16, dtype=torch.float64)
    mesh = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")
    plan = fxshard.plan(model, (x,), mesh, input_layouts="S(0)R", pins={"up.weight": "RS(0)", "gate": "S(0)S(2)"})
    print(f"gate runs as {plan.specs['gate']}; nodes without a rule: {len(plan.fallbacks)}")

    result = fxshard.simulate(model, (x,), plan)
    want = model(x)
    want.sum().backward()
    assert model.scale.grad is not None
    torch.testing.assert_close(result.outputs, want.detach())
    torch.testing.assert_close(result.grads["scale"], model.scale.grad)
    print(f"{mesh.size} ranks compute the same as one device, with {len(result.collectives)} collectives")


if __name__ == "__main__":
    main()
