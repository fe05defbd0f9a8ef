"""One plan, made at one size, at others: the sweep's models, forward and backward, even and odd sizes, against one device in float64."""

from __future__ import annotations

import pytest
from any_size import DYNAMIC, SIZES, programs, served, traced


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_that_divide(name: str) -> None:
    model, graph, call = traced(name, 4, 8, uneven=False)
    (program,) = programs(graph, "a=2", [])
    assert all(served(program, model, call(batch, seq)) for batch, seq in ((4, 8), (8, 12), (12, 16)))


@pytest.mark.parametrize("name", ["mlp", "gpt2", "cnn"])
def test_odd_sizes_by_one_program(name: str) -> None:
    model, graph, call = traced(name, 5, 7, uneven=True)
    for program in programs(graph, "a=2", [0]):
        assert all(served(program, model, call(batch, seq)) for batch, seq in ((5, 7), (9, 11), (4, 8), (6, 5)))


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_ten_sizes_and_ten_random_plans(name: str, mesh: str, uneven: bool) -> None:
    model, graph, call = traced(name, 8, 8, uneven) if not uneven else traced(name, 9, 11, uneven)
    for program in programs(graph, mesh, range(10)):
        found = {size for size in SIZES if served(program, model, call(*size))}
        wanted = {size for size in SIZES if min(size) > 4 or (size[0] % 4 == 0 and size[1] % 4 == 0)} if uneven else {(4, 8), (8, 16)}
        assert wanted <= found, (found, program.guards)
