"""MemoryRecorder: known cases, and against the CPU allocator as the profiler sees it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxshard.testing.memory import MemoryRecorder, SingleRankCollectives

K = 1000 * 4
"""Bytes of a thousand float32."""


def test_given_tensors_count_from_the_start_and_views_count_once() -> None:
    x = torch.ones(1000)
    with MemoryRecorder([x, x.view(10, 100)]) as recorder:
        assert recorder.alive == K
        x.add_(1)
        rows = x.view(10, 100).t()[2:].unsqueeze(0)
        assert recorder.alive == recorder.peak == K
        y = rows + 1
        assert recorder.alive == K + y.numel() * 4
    assert recorder.peak_op == "aten.add.Tensor"


def test_a_storage_dies_with_its_last_view() -> None:
    with MemoryRecorder() as recorder:
        x = torch.ones(1000)
        part = x[:1]
        del x
        assert recorder.alive == K
        del part
        assert recorder.alive == 0 and recorder.peak == K


def test_tensors_saved_by_autograd_are_alive() -> None:
    w = torch.ones(1000, requires_grad=True)
    with MemoryRecorder([w]) as recorder:
        loss = w.exp().sum()
        assert recorder.alive == 2 * K + 4
        loss.backward()
        assert recorder.alive == 2 * K + 4  # the gradient is alive, the tensor saved by exp is not
        assert w.grad is not None


def test_a_storage_that_grows() -> None:
    with MemoryRecorder() as recorder:
        x = torch.empty(1000)
        x.resize_(2000)
        assert recorder.alive == 2 * K


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True)


@pytest.mark.parametrize("make", [perceptron, attention])
def test_the_peak_is_that_of_the_allocator(make: Callable[[], nn.Module]) -> None:
    """Except for workspaces of kernels, which only the allocator sees."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 32, 64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    step()
    model.zero_grad()
    given = [x, *model.parameters()]
    with MemoryRecorder(given) as recorder:
        step()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    truth = max(itertools.accumulate(sizes, initial=sum(t.numel() * 4 for t in given)))
    assert recorder.peak == pytest.approx(truth, rel=0.03)


def test_collectives_of_a_single_rank() -> None:
    """They have the shapes of a real mesh, the values as if all ranks held the same, and new storages; a wait shares storage."""
    c10d = torch.ops._c10d_functional
    x = torch.arange(8.0).view(4, 2)
    with SingleRankCollectives():
        gathered = c10d.all_gather_into_tensor(x, 2, "tp")
        scattered = c10d.reduce_scatter_tensor(x, "sum", 2, "tp")
        reduced = c10d.all_reduce(x, "sum", "tp")
        exchanged = c10d.all_to_all_single(x, [2, 2], [2, 2], "tp")
        assert c10d.wait_tensor(reduced) is reduced
        out = torch.empty(8, 2)
        assert c10d.all_gather_into_tensor_out(x, 2, "tp", out=out) is out and torch.equal(out, gathered)
        assert c10d.all_reduce_(x, "sum", "tp") is x
    assert torch.equal(gathered, torch.cat([x, x])) and torch.equal(scattered, x[:2])
    assert torch.equal(reduced, x) and torch.equal(exchanged, x)
    assert len({t.untyped_storage().data_ptr() for t in (x, gathered, scattered, reduced, exchanged)}) == 5


@pytest.mark.parametrize("dims", [2, 3])
def test_indices_of_another_ranks_shard_do_no_harm(dims: int) -> None:
    """torch's kernels write where indices say, without a check: beyond the end, if data came from a rank that does not exist."""
    x, grad = torch.zeros(1, 1, *[2] * dims), torch.ones(1, 1, *[1] * dims)
    indices = torch.full_like(grad, 10**6, dtype=torch.int64)
    backward = (torch.ops.aten.max_pool2d_with_indices_backward, torch.ops.aten.max_pool3d_with_indices_backward)[dims - 2]
    with SingleRankCollectives():
        found = backward(grad, x, [2] * dims, [2] * dims, [0] * dims, [1] * dims, False, indices)
    assert found.sum() == found.flatten()[0] == 1
