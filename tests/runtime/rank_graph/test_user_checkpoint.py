"""Values that the user checkpoints are computed again in the backward, not saved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.rank_graph.bind import bind
from fxshard.runtime.rank_graph.rank_graph import rank_graph, split_graph


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


class Block(nn.Module):
    """Two layers with a tanh after each, and a last one; ``again``: the two are in a checkpoint."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.again = again

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return self.last(torch.tanh(y))


def backward_operators(again: bool, compiler: str, mesh: DeviceMesh) -> list[str]:
    graph = trace(Block(again), (torch.randn(4096, 64),))
    pins = {name: "R" for name, _ in Block(again).named_parameters()}
    request = Request(cache=False, input_layouts="S(0)", output_layouts="S(0)", pins=pins)
    bound = bind(lower_plan(graph, plan_graph(graph, Mesh({"dp": 2}), request)), mesh)
    parts = split_graph(bound, rank_graph(bound, compiler))
    assert parts is not None
    return [str(n.target) for n in parts.backward.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_checkpointed_operators_run_again(compiler: str, two_ranks: DeviceMesh) -> None:
    kept, again = (backward_operators(flag, compiler, two_ranks) for flag in (False, True))
    assert "aten.tanh.default" not in kept
    assert again.count("aten.tanh.default") == kept.count("aten.tanh.default") + 1
    assert again.count("aten.mm.default") == kept.count("aten.mm.default") + 1, (
        "the first product: the backward reads only the result of the second"
    )
