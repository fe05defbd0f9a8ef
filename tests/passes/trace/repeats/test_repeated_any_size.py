"""Equal layers are traced as four with symbolic sizes too: the same graph, guards and lines as tracing each layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.llama import Llama
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.trace.trace import trace
from fxshard.shapes import DynamicDim
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from tests.passes.trace.repeats.test_repeated import LAYERS, Block, Stack, blocks, checked, traced_as_four
from tests.passes.trace.repeats.test_repeated_models import TRACED_AS_FOUR, Case
from tests.passes.tracing import SQUARE, real, simulated
from tests.torch_versions import SINCE_2_15

TOKENS = torch.zeros(4, 16, dtype=torch.int64)
ALL = "layers.0 to layers.6"


@pytest.fixture(autouse=True)
def _log_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxshard")


def dims(paths: Sequence[str], sizes: Sequence[int]) -> tuple[DynamicDim, ...]:
    """A dynamic dim for each of the first ``len(sizes)`` dims, shared by all these tensors."""
    return tuple(DynamicDim(f"d{k}", tuple((path, k) for path in paths), size) for k, size in enumerate(sizes))


def checked_of_any_size(model: nn.Module, args: Sequence[Any], paths: Sequence[str], sizes: Sequence[int], **options: Any) -> PlanningGraph:
    graph = checked(model, args, dynamic=dims(paths, sizes), **options)
    assert graph.family is not None and len(graph.family.dims) == len(sizes)
    return graph


def test_a_llama(caplog: pytest.LogCaptureFixture) -> None:
    checked_of_any_size(Llama.small(layers=5), (TOKENS, TOKENS), ("args[0]", "args[1]"), (4, 16))
    assert traced_as_four(caplog) == "layers.0 to layers.4"


def test_buffers_and_draws(caplog: pytest.LogCaptureFixture) -> None:
    checked_of_any_size(Stack(blocks()), (real(4, 8).float(),), ("args[0]",), (4,))
    assert traced_as_four(caplog) == ALL


class Sized(nn.Module):
    """Takes a length and computes with the sizes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, length: int) -> Tensor:
        rows = x.shape[0] * length
        y = self.linear(x).reshape(rows, 8)
        return x + y.reshape(x.shape[0], length, 8) / rows + torch.arange(length).reshape(1, length, 1)


def with_length(self: Stack, x: Tensor) -> Tensor:
    length = x.shape[1]
    for layer in self.layers:
        x = layer(x, length)
    return self.outer(x)


class OverLength(nn.Module):
    """Takes a length, by which it divides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, length: int) -> Tensor:
        return self.linear(x) / length


def with_other_lengths(self: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(self.layers):
        x = layer(x, x.shape[1] + 0 * index)
        x = x[:, 1:]
    return self.outer(x)


@pytest.mark.parametrize("train", [True, False])
def test_lengths_are_arguments(train: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Stack([Sized() for _ in range(LAYERS)], with_length).train(train)
    checked_of_any_size(model, (real(4, 6, 8).float(),), ("args[0]",), (4, 6), train=train)
    first = 0 if SINCE_2_15 else 1  # its input is a view, which 2.15 does not guard
    assert traced_as_four(caplog) == f"layers.{first} to layers.6"


def test_layers_of_different_lengths_are_not_equal(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack([OverLength() for _ in range(5)], with_other_lengths)
    checked_of_any_size(model, (real(4, 16, 8).float(),), ("args[0]",), (4, 16))
    assert not traced_as_four(caplog)
    assert "arguments or the call are others" in caplog.text


class Branching(Block):
    """Takes another branch for short inputs, so every layer makes a guard, the last one too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[0] * 3 > 9 else x


def test_equal_branches_on_a_size_make_one_guard(caplog: pytest.LogCaptureFixture) -> None:
    graph = checked_of_any_size(Stack(blocks(Branching)), (real(5, 8).float(),), ("args[0]",), (5,))
    assert traced_as_four(caplog) == ALL
    assert graph.family is not None
    assert [g.where is not None and "test_repeated_any_size.py" in g.where for g in graph.family.guards].count(True) == 1


def test_sharded_results_equal_one_device_at_other_sizes(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)]).double()
    graph = trace(model, (real(4, 8),), dynamic=dims(("args[0]",), (4,)))
    assert traced_as_four(caplog) == ALL
    assert graph.family is not None
    for size in (2, 6, 8):
        x = real(size, 8)
        there = replace(graph, module=graph.family.at({"d0": size}), family=None)
        result = simulated(there, SQUARE, model, (x,))
        assert_equal_to_one_device(result, one_device(model, (x,)))


@pytest.mark.slow
@pytest.mark.parametrize("make", TRACED_AS_FOUR)
@pytest.mark.parametrize("train", [True, False])
def test_a_model_of_transformers(make: Callable[[], Case], train: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, kwargs = make()
    places = tuple((f"kwargs['{name}']", 0) for name in kwargs)
    graph = checked(model.train(train), (), kwargs, train=train, dynamic=(DynamicDim("batch", places, 2),))
    assert traced_as_four(caplog) == TRACED_AS_FOUR[make]
    assert graph.family is not None and len(graph.family.dims) == 1
