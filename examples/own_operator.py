"""Teaches fxshard an operator of your own by one line, and tests the line: random plans must compute what one device computes.

python examples/own_operator.py
python examples/own_operator.py --plans 50 --dp 4 --tp 2
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fxshard


@torch.library.custom_op("own::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [batch, length, hidden]. It stands for a kernel of yours."""
    return nn.functional.silu(gate) * up


@torch.library.custom_op("own::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    s = gate.sigmoid()
    return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


# torch needs the shapes of results, and the backward.
swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
swiglu_backward.register_fake(lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)))
swiglu.register_autograd(
    lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class FeedForward(nn.Module):
    def __init__(self, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10, help="how many random plans to test")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    model, x = FeedForward().double(), torch.randn(5, 4, 32, dtype=torch.float64)  # 5 rows: shards may be uneven
    mesh = fxshard.Mesh({"dp": options.dp, "tp": options.tp}, hardware="h100")
    for node, reason in fxshard.plan(model, (x,), mesh).fallbacks:
        print(f"{node} would run whole on every rank: {reason}")

    # Dims with the same letter are sharded together.
    fxshard.register_rule("own::swiglu", "b s h, b s h -> b s h")
    fxshard.register_rule("own::swiglu_backward", "b s h, b s h, b s h -> b s h, b s h")
    print(f"with rules: {len(fxshard.plan(model, (x,), mesh).fallbacks)} nodes run whole")

    want = model(x)
    want.sum().backward()
    sharded = 0
    for seed in tqdm(range(options.plans), desc="random plans", disable=None):  # None: on a terminal only
        plan = fxshard.testing.random_plan(model, (x,), mesh, seed=seed)
        result = fxshard.simulate(model, (x,), plan)  # all ranks, in this process
        torch.testing.assert_close(result.outputs, want.detach())
        torch.testing.assert_close(result.grads["gate.weight"], model.gate.weight.grad)
        sharded += "S" in str(plan.specs["swiglu"])
    print(f"{options.plans} random plans on {mesh.size} ranks compute what one device computes; {sharded} of them shard swiglu")


if __name__ == "__main__":
    main()
