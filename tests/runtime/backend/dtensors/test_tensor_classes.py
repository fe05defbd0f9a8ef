"""Tensor subclasses among the arguments and results of a compiled function: as eager torch computes them, gradients included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from fxshard.errors import RunError
from tests.passes.trace.fakes.test_tensor_kinds import Quantised


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("rank") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield {"mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "compiler": "eager"}
    dist.destroy_process_group()


def pair(rows: int) -> Any:
    torch.manual_seed(rows)
    return TwoTensor(*(torch.randn(rows, 3, dtype=torch.float64) for _ in range(2))).requires_grad_()


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * 2, x @ x.mT


def test_pairs_of_any_size(options: dict[str, Any]) -> None:
    """The second size is dynamic for Dynamo."""
    compiled = torch.compile(scaled, backend="fxshard", options=options)
    for rows in (2, 4, 6):
        given, own = pair(rows), pair(rows)
        have, want = compiled(given), scaled(own)
        for results in (have, want):
            (results[0].cos().sum() + results[1].sum()).backward()
        for x, y in zip((*have, given.grad), (*want, own.grad), strict=True):
            assert type(x) is TwoTensor
            torch.testing.assert_close((x.a, x.b), (y.a, y.b), rtol=1e-12, atol=1e-12)


def test_a_gradient_of_another_class_is_refused(options: dict[str, Any]) -> None:
    out = torch.compile(lambda x: x * 3, backend="fxshard", options=options)(pair(2))
    with pytest.raises(RunError, match="the gradient of a TwoTensor is a Tensor"):
        out.backward(torch.ones(2, 3, dtype=torch.float64))


def test_quantised_weights(options: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.arange(-12, 12, dtype=torch.int8).view(6, 4)
            self.weight = nn.Parameter(Quantised(whole, torch.linspace(0.1, 0.6, 6, dtype=torch.float64)[:, None]), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(nn.functional.linear(x, self.weight))

    net, x = Net(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = torch.compile(net, backend="fxshard", options=options)(x)
    out.square().sum().backward()
    own = x.detach().requires_grad_()
    want = torch.relu(own @ (net.weight.whole.double() * net.weight.scale).T)
    want.square().sum().backward()
    torch.testing.assert_close((out, x.grad), (want, own.grad), rtol=1e-12, atol=1e-12)
