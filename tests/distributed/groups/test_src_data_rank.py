"""src_data_rank: ranks with different weights all get those of one rank; with None each keeps its own, and nothing is sent."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel

import fxshard
from fxshard.errors import OptionError, RunError
from fxshard.layout.layouts import Layout
from fxshard.runtime.groups.distribute import distribute
from fxshard.runtime.module.parameters import shard_parameters
from tests.distributed.scenarios import cases_on_ranks

pytestmark = pytest.mark.distributed

X = torch.linspace(-1, 1, 15).reshape(3, 5)
PLAIN = ("broadcast", "send", "recv", "scatter", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "barrier")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.down.bias = nn.Parameter(torch.rand(5))
        self.register_buffer("shift", torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) + self.shift)


def of_rank(rank: int) -> Net:
    torch.manual_seed(100 + rank)
    return Net()


def parallel(rank_of_values: int, mesh: DeviceMesh, **options: Any) -> nn.Module:
    pins = {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}
    return fxshard.parallelize(of_rank(rank_of_values), (X,), mesh, train=False, pins=pins, compiler="eager", **options)


def each_layout_and_source() -> None:
    """Compares with ``distribute_tensor`` of the source's value, which every rank can make here."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for mesh in (line, square):
        one = [Replicate(), Shard(0), Shard(1)]
        for layout, source in itertools.product(itertools.product(one, repeat=mesh.ndim), (0, 2, 3)):
            values = [torch.rand(5, 3, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16) for r in range(4)]
            want = distribute_tensor(values[source], mesh, list(layout), src_data_rank=None).to_local()
            have = distribute(values[dist.get_rank()], Layout(layout), mesh, source)
            assert torch.equal(have, want), (layout, source, have, want)


def the_source_is_the_truth() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, want = parallel(dist.get_rank(), mesh, src_data_rank=3), of_rank(3)
    for name, parameter in want.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
    assert torch.equal(model.shift, want.shift)
    torch.testing.assert_close(model(X), want(X))


def none_sends_nothing() -> None:
    """Neither through functional collectives nor through torch.distributed's own; ranks keep what they hold."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with CommDebugMode() as issued:
        shard_parameters(of_rank(0), {"up.weight": Layout.parse("S(0)")}, mesh, torch.device("cpu"))
    assert not issued.get_total_counts()
    called: list[str] = []
    kept = {name: getattr(dist, name) for name in PLAIN}
    try:
        for name in PLAIN:
            setattr(dist, name, lambda *args, name=name, **kwargs: called.append(name) or kept[name](*args, **kwargs))
        model = parallel(dist.get_rank(), mesh, src_data_rank=None)
        assert not called
        parallel(dist.get_rank(), mesh, src_data_rank=1)
        assert called  # so the recording works
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
    own = of_rank(dist.get_rank()).up.weight.detach().chunk(4)
    assert torch.equal(model.up.weight.to_local(), own[dist.get_rank()] if dist.get_rank() < len(own) else own[0][:0])


def by_default_weights_are_compared() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(RunError, match="differ in the weights of"):
        parallel(dist.get_rank(), mesh)
    with pytest.raises(OptionError, match="src_data_rank is 4"):
        parallel(0, mesh, src_data_rank=4)


def with_styles(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The rank's own net, with styles for ``up`` on ``tp`` alone."""
    styles = {"up": ColwiseParallel(output_layouts=Replicate())}
    plan: Any = styles if mesh.ndim == 1 else {"tp": styles}
    return fxshard.parallelize_module(of_rank(dist.get_rank()), mesh, plan, compiler="eager", **options)


def styles_take_the_source_of_each_axis() -> None:
    """All parameters and buffers, whether styles name them or not, before the first call and after it."""
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mesh, given, source in ((line, {}, 0), (line, {"src_data_rank": 3}, 3), (square, {}, 0), (square, {"src_data_rank": 1}, 3)):
        model, want = with_styles(mesh, **given), of_rank(source)
        for moment in ("before", "after"):
            for name, parameter in want.named_parameters():
                local = distribute_tensor(parameter, mesh, model.get_parameter(name).placements, src_data_rank=None).to_local()
                assert torch.equal(model.get_parameter(name).to_local(), local), (moment, name, given, mesh)
            torch.testing.assert_close(model(X), want(X))
        assert torch.equal(model.shift, want.shift)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def styles_of_a_tied_weight_take_the_source_too() -> None:
    """torch gives the styled module a weight of its own, which each tp row would keep otherwise."""
    torch.manual_seed(100 + dist.get_rank())
    model, source = Tied(), torch.Generator().manual_seed(0)
    model.embed.weight.data.copy_(torch.rand(8, 4, generator=source) + dist.get_rank())
    want = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    fxshard.parallelize_module(model, square, {"tp": {"head": ColwiseParallel(output_layouts=Replicate())}}, compiler="eager")
    weight = model.head.weight
    assert torch.equal(weight.to_local(), want.chunk(2)[square.get_local_rank("tp")])


def styles_without_a_source_keep_what_each_rank_has() -> None:
    mesh, rank = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), dist.get_rank()
    model, own = with_styles(mesh, src_data_rank=None), of_rank(rank)
    assert torch.equal(model.up.weight.to_local(), own.up.weight.chunk(4)[rank])
    assert torch.equal(model.down.weight.to_local(), own.down.weight) and torch.equal(model.shift, own.shift)
    with pytest.raises(OptionError, match="there is no rank 4 on each axis"):
        with_styles(mesh, src_data_rank=4)


SCENARIOS = (
    each_layout_and_source,
    the_source_is_the_truth,
    none_sends_nothing,
    by_default_weights_are_compared,
    styles_take_the_source_of_each_axis,
    styles_of_a_tied_weight_take_the_source_too,
    styles_without_a_source_keep_what_each_rank_has,
)


found, test_on_four_ranks = cases_on_ranks(4, {s.__name__: s for s in SCENARIOS}, seconds=120)
