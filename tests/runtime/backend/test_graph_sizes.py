"""The dynamic sizes of a Dynamo graph: each symbol is one size, wherever it occurs; other numbers are not sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxshard.runtime.backend.dynamo_graph import DynamoGraph, read_graph
from fxshard.runtime.backend.graph_sizes import dims_of


def captured(function: Callable[..., Any], *args: Any) -> tuple[DynamoGraph, list[Any]]:
    """The first graph of ``function`` with dynamic sizes, and the arguments of its call."""
    torch._dynamo.reset()
    found: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graph = read_graph(module, inputs)

        def called(*values: Any) -> Any:
            found.append((graph, list(values)))
            return module.forward(*values)

        return called

    torch.compile(function, backend=backend, dynamic=True)(*args)
    return found[0]


def said(graph: DynamoGraph, args: list[Any]) -> dict[str, tuple[str, int]]:
    return {dim.name: (str(dim), dim.example) for dim in dims_of(graph.sizes, graph.names, args)}


def test_equal_symbols_are_one_size_and_no_number_of_the_call() -> None:
    graph, args = captured(lambda x, y: x + y.sum(1) * x.shape[0], torch.ones(3), torch.ones(3, 5))
    assert said(graph, args) == {"y_0": ("dim 0 of y, dim 0 of x", 3), "y_1": ("dim 1 of y", 5)} or said(graph, args) == {
        "x_0": ("dim 0 of x, dim 0 of y", 3),
        "y_1": ("dim 1 of y", 5),
    }
    assert graph.numbers == []
    assert all(size.least == 2 and size.most is None for size in graph.sizes)


def test_a_size_computed_from_another_is_a_size_too() -> None:
    def halves(x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[0] == 2 * y.shape[0]
        return x.view(2, -1) + y

    graph, args = captured(halves, torch.ones(6), torch.ones(3))
    assert said(graph, args) == {"x_0": ("dim 0 of x", 6), "y_0": ("dim 0 of y", 3)}


def test_numbers_that_are_no_sizes_belong_to_the_call() -> None:
    graph, _ = captured(lambda x, n, factor: x.sum() * n * factor, torch.ones(3), 5, 0.5)
    assert sorted(graph.names[i] for i in graph.numbers) == ["factor", "n"]


@pytest.mark.parametrize(("bound", "least", "most"), [(lambda n: n > 4, 5, None), (lambda n: n < 9, 2, 8)])
def test_the_range_is_what_dynamo_guards(bound: Callable[[int], bool], least: int, most: int | None) -> None:
    graph, _ = captured(lambda x: x + 1 if bound(x.shape[0]) else x - 1, torch.ones(6))
    assert [(size.least, size.most) for size in graph.sizes] == [(least, most)]
