"""Plans made at one size and run at others: models of the sweep, forward and backward, against one device in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from any_size import DYNAMIC, SIZES, programs, random_programs, served, traced

from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import lower_plan
from fxshard.testing.random_plan import random_graph_plan

FEWEST = {"mlp": (1, 8), "gpt2": (2, 2), "cnn": (1, 8)}
"""(batch, length): the least sizes that the program serves."""
BRANCHES: dict[str, Callable[[int, int], bool]] = {
    "gpt2": lambda batch, seq: batch > 1 and seq > 1,
    "bert": lambda batch, seq: seq > 1,
    "t5": lambda batch, seq: seq > 1,
}
"""Sizes on one side of a branch in model code: attention of transformers is causal at lengths above 1, GPT-2's mask branches on batch 1."""


def always(batch: int, seq: int) -> bool:
    return True


ODD = ("gpt2", "cnn", "vit")
"""Run at odd sizes below, or like one that is."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in ODD else []) for name in DYNAMIC])
def test_even_sizes_by_one_program(name: str) -> None:
    model, graph, call = traced(name, 4, 8, uneven=False)
    (program,) = programs(graph, "a=2", [])
    assert all(served(program, model, call(batch, seq)) for batch, seq in ((4, 8), (6, 12)))


@pytest.mark.parametrize(("name", "seeds"), [("mlp", [0]), ("gpt2", []), ("cnn", [0])])
def test_odd_sizes_by_one_program(name: str, seeds: list[int]) -> None:
    model, graph, call = traced(name, 5, 7, uneven=True)
    for program in programs(graph, "a=2", seeds):
        assert all(served(program, model, call(batch, seq)) for batch, seq in ((5, 7), (9, 11), (4, 8), FEWEST[name]))


def test_merged_collectives_of_rounded_sizes() -> None:
    """With the hardware "cpu" many gathers of a random plan are merged, even if torch cannot prove the sizes of their parts."""
    model, graph, call = traced("gpt2", 5, 7, uneven=True)
    mesh = Mesh({"a": 2}, hardware="cpu")
    program = lower_plan(graph, random_graph_plan(annotate(graph, mesh), 0))
    assert any(len(one.serves) > 1 for one in program.collectives)
    assert any(node.target is torch.ops.aten.as_strided.default for node in program.first.graph.nodes)
    assert all(served(program, model, call(batch, seq)) for batch, seq in ((9, 11), (5, 7), (3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_ten_sizes_and_ten_random_plans(name: str, mesh: str, uneven: bool) -> None:
    """The solver's plan runs at ten sizes; random plans too, on two axes at two sizes each. With uneven shards every size is served,
    except as ``BRANCHES`` says.
    """
    model, graph, call = traced(name, 8, 8, uneven) if not uneven else traced(name, 9, 11, uneven)
    wanted = {size for size in SIZES if BRANCHES.get(name, always)(*size)} if uneven else {(4, 8), (8, 16)}
    for i, program in enumerate((*programs(graph, mesh, []), *random_programs(graph, mesh, 10))):
        some = SIZES if i == 0 or mesh == "a=2" else (SIZES[i % len(SIZES)], SIZES[-2:][i % 2])
        found = {size for size in some if served(program, model, call(*size))}
        assert wanted & set(some) <= found, (found, program.guards)
