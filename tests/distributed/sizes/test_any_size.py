"""Dynamic sizes on two ranks: how many programs are made, their numbers, and messages about sizes that must stay static."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.export import Dim

from fxshard.errors import OptionError, TraceError
from fxshard.runtime.calls.inputs import local_batch
from fxshard.runtime.module.module import parallelize
from tests.distributed.scenarios import two_ranks

pytestmark = pytest.mark.distributed


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).softmax(-1)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def step(model: nn.Module, args: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    """Loss and whole gradients of one step; ``model`` has no gradients afterwards."""
    out = model(*args)
    loss = out.full_tensor().square().sum() if hasattr(out, "full_tensor") else out.square().sum()
    loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), [g for g in grads if g is not None]


def same(
    sharded: nn.Module, single: nn.Module, args: Sequence[Any], *, whole: Sequence[Any] | None = None, tolerance: float = 1e-9
) -> None:
    (loss, grads), (want, wanted) = step(sharded, args), step(single, whole or args)
    torch.testing.assert_close(loss, want, rtol=tolerance, atol=tolerance)
    for grad, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=tolerance, atol=tolerance)


def pair(model: nn.Module, args: Sequence[Any], **options: Any) -> tuple[nn.Module, nn.Module]:
    single = copy.deepcopy(model)
    return parallelize(model, args, mesh(), **{"compiler": "eager", "cache": False, **options}), single


def rows(count: int) -> tuple[Tensor, ...]:
    return (torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(count)),)


def made(model: nn.Module) -> int:
    return len(model.forward.programs)  # type: ignore[union-attr]


def second_size_makes_a_dim_dynamic() -> None:
    sharded, single = pair(Perceptron().double(), rows(4), input_layouts="S(0)")
    for count, programs in ((4, 1), (6, 2), (8, 2), (2, 2), (20, 2), (4, 2)):
        same(sharded, single, rows(count))
        assert made(sharded) == programs, (count, made(sharded))
    for count, programs in ((7, 3), (5, 3), (11, 3), (3, 3), (6, 3)):  # uneven shards: one more program serves them all
        same(sharded, single, rows(count))
        assert made(sharded) == programs, (count, made(sharded))
    same(sharded, single, rows(1))  # one row on two ranks: one shard is empty
    assert made(sharded) == 3


def dynamic_false_makes_a_program_per_size() -> None:
    sharded, single = pair(Perceptron().double(), rows(4), dynamic=False)
    for count in (4, 6, 8, 6):
        same(sharded, single, rows(count))
    assert made(sharded) == 3
    with pytest.raises(OptionError, match="dynamic=False contradicts dynamic_shapes"):
        parallelize(Perceptron(), (torch.zeros(4, 8),), mesh(), dynamic=False, dynamic_shapes={"x": {0: "n"}})


def requested_dynamic_dims_need_one_program() -> None:
    shapes = {"x": {0: Dim("batch", min=2, max=64)}}
    sharded, single = pair(Perceptron().double(), rows(4), dynamic_shapes=shapes, input_layouts="S(0)")
    for count in (4, 6, 12, 2):
        same(sharded, single, rows(count))
    assert made(sharded) == 1
    marked = rows(4)
    torch._dynamo.mark_dynamic(marked[0], 0)
    sharded, single = pair(Perceptron().double(), marked)
    for count in (4, 6, 9):
        same(sharded, single, rows(count))
    assert made(sharded) == 1
    sharded, single = pair(Perceptron().double(), rows(4), dynamic=True)
    for count in (4, 10):
        same(sharded, single, rows(count))
    assert made(sharded) == 1


def own_batches_of_each_rank() -> None:
    device_mesh = mesh()
    single = Perceptron().double()
    sharded = parallelize(copy.deepcopy(single), (local_batch(rows(2)[0], device_mesh),), device_mesh, compiler="eager", cache=False)
    for count in (2, 3, 5, 7):
        both = torch.cat([torch.full((count, 8), rank + count / 10, dtype=torch.float64) for rank in range(2)])
        mine = local_batch(both.chunk(2)[device_mesh.get_rank()], device_mesh)
        same(sharded, single, (mine,), whole=(both,))
    assert made(sharded) == 2


class BranchesOnSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2 if x.shape[0] == 6 else 1)


def a_size_that_the_model_branches_on_stays_static() -> None:
    sharded, single = pair(BranchesOnSize().double(), rows(4))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fxshard").addHandler(handler)
    try:
        for count in (4, 6, 8):
            same(sharded, single, rows(count))
    finally:
        logging.getLogger("fxshard").removeHandler(handler)
    if mesh().get_rank() == 0:
        assert any("sizes stay static: " in line and "the model fixes it to 6" in line for line in said), said
    with pytest.raises(TraceError, match="cannot change, the model fixes it to 6"):
        pair(BranchesOnSize().double(), rows(6), dynamic_shapes={"x": {0: "n"}})


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.limit = nn.Linear(8, 4, bias=False), 3

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)).reshape(x.shape[0] * 4)
        return torch.tanh(y) if x.shape[0] > self.limit else torch.sin(y)


def an_attribute_that_a_guard_reads() -> None:
    """An attribute that does not matter at one size may matter at another."""
    sharded, single = pair(Limited().double(), rows(4))
    for limit in (3, 5, 3):
        sharded.limit = single.limit = limit  # type: ignore[assignment]
        for count in (6, 4, 8):
            same(sharded, single, rows(count))


def after_a_mode_change_sizes_still_share_programs() -> None:
    sharded, single = pair(Perceptron().double(), rows(4), input_layouts="S(0)")
    for count in (4, 6, 7, 9):
        same(sharded, single, rows(count))
    sharded.eval(), single.eval()
    for count in (4, 6, 8, 7, 5, 10, 11):
        same(sharded, single, rows(count))
    assert made(sharded) <= 6, made(sharded)


class Positions(nn.Module):
    """Attention and positions, for which Inductor guards on a length of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(x)).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        y = ((y @ y.transpose(-1, -2)).softmax(-1) @ y).transpose(1, 2).reshape(x.shape[0], x.shape[1], 8)
        return x + y * torch.arange(x.shape[1])[None, :, None] / x.shape[1]


def other_lengths_compile_once() -> None:
    """Inductor compiles for the first length and once for all others, by torch's own counters."""
    torch.manual_seed(3)
    x = torch.randn(2, 20, 8)
    sharded, single = pair(Positions(), (x[:, :8],), compiler="inductor")
    counters.clear()
    compiled = []
    for length in (8, 12, 16, 9, 7, 20, 3, 8):
        same(sharded, single, (x[:, :length].contiguous(),), tolerance=1e-5)
        compiled.append(counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"])
    assert made(sharded) == 2
    assert compiled[0] == 0 and compiled[1] == compiled[-1] == 2, compiled  # a forward and a backward


def a_length_of_one_is_static_and_the_batch_stays_dynamic() -> None:
    shapes = ({0: Dim("batch"), 1: Dim("seq")},)
    x = torch.randn(4, 6, 8)
    sharded, single = pair(Positions(), (x,), compiler="inductor", input_layouts="S(0)", dynamic_shapes=shapes)
    counts = []
    for batch, seq in ((4, 6), (6, 8), (2, 1), (4, 1), (8, 1), (6, 1)):
        same(sharded, single, (torch.randn(batch, seq, 8),), tolerance=1e-5)
        counts.append(made(sharded))
    assert counts[-1] == counts[2] <= 3, counts


found, test_two_ranks = two_ranks(
    a_length_of_one_is_static_and_the_batch_stays_dynamic,
    second_size_makes_a_dim_dynamic,
    dynamic_false_makes_a_program_per_size,
    requested_dynamic_dims_need_one_program,
    own_batches_of_each_rank,
    a_size_that_the_model_branches_on_stays_static,
    an_attribute_that_a_guard_reads,
    after_a_mode_change_sizes_still_share_programs,
    other_lengths_compile_once,
)
