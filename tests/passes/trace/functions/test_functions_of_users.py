"""``torch.autograd.Function``s under random legal plans, simulated: outputs, gradients and buffers are those of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import fxshard
from fxshard.errors import TraceError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.trace.trace import trace
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.functions_of_users import CASES, Again, Net
from tests.passes.tracing import SQUARE, TWO, real, simulated


@pytest.mark.parametrize(
    ("case", "train"), [*((case, True) for case in CASES), *(pytest.param(case, False, marks=pytest.mark.slow) for case in CASES)]
)
def test_results_equal_one_device(case: str, train: bool) -> None:
    """Five rows, so that shards are uneven."""
    torch.manual_seed(0)
    model, x = Net(case).double(), real(5, 6, grad=False)
    graph, reference = trace(model, (x,), train=train), one_device(model, (x,), train=train)
    for mesh in (TWO, SQUARE):
        for plan in range(2):
            assert_equal_to_one_device(simulated(graph, mesh, model, (x,), plan=plan), reference)


def test_capturing_leaves_functions_alone() -> None:
    """Afterwards torch's own capture refuses the function as before."""
    fxshard.plan(Net("again").double(), (real(5, 6, grad=False),), Mesh({"a": 2}))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="trace_autograd_ops"):
        torch.compile(Net("again"), backend="eager", fullgraph=True)(torch.ones(5, 6))
    assert "jvp" not in vars(Again)


def test_an_error_says_what_to_do() -> None:
    """After the call the buffer needs a gradient, as in eager torch."""

    class Added(Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, total: Tensor) -> Tensor:
            ctx.mark_dirty(total)  # type: ignore[attr-defined]  # torch types ctx without it
            return total.add_(x)

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.total = nn.Parameter(torch.ones(4)), nn.Buffer(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return Added.apply(self.weight * x, self.total) * 2

    with pytest.raises(TraceError, match=r"total is changed in place and needs a gradient(.|\n)*detach it first"):
        fxshard.plan(Total(), (torch.ones(4),), Mesh({"a": 2}))
