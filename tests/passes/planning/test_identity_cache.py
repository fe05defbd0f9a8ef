"""Equal parts of a graph share cached results, and give the same problem as without the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from passes.tracing import SQUARE, Function
from zoo import llama

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.planning.constrain import constraints_of
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.trace.trace import trace


def test_results_are_cached_by_identity() -> None:
    alike, made = IdentityCache(), []
    first, second = (1, 2), tuple([1, 2])  # equal, two objects

    def ask(key: object, *objects: object) -> object:
        return alike(key, objects, lambda: made.append(object()) or made[-1])

    assert ask("key", first) is ask("key", first)
    assert ask("key", second) is not ask("key", first)
    assert ask("other", first) is not ask("key", first)
    assert ask("key", first, second) is not ask("key", second, first)
    assert len(made) == 5


def test_cached_objects_stay_alive_so_that_no_id_is_reused() -> None:
    alike = IdentityCache()
    assert [alike("key", [[n]], lambda n=n: n) for n in range(100)] == list(range(100))


@cache
def repeated_reads() -> PlanningGraph:
    """One value is read twice by a node, one is returned unchanged, one is shared by two outputs and a gradient."""

    def body(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x @ y
        return z * z, z.softmax(-1) + z, x

    return trace(Function(body), (torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)))


@cache
def small_llama() -> PlanningGraph:
    return trace(*llama())


@pytest.mark.parametrize("graph", [repeated_reads, small_llama], ids=["reads", "llama"])
@pytest.mark.parametrize("objective", ["time", "communication"])
def test_problem_is_the_same_without_sharing(graph: Callable[[], PlanningGraph], objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = graph()
    name = traced.inputs[0].name
    annotated = annotate(traced, SQUARE)
    constraints = constraints_of(traced, SQUARE, pins={name: Layout.parse("RS(0)")})
    shared = formulate(annotated, constraints, objective)
    monkeypatch.setattr(IdentityCache, "__call__", lambda self, key, objects, make: make())
    assert _numbers(formulate(annotated, constraints, objective)) == _numbers(shared)


def _numbers(formulation: Formulation) -> list[Any]:
    """The whole problem in a form that can be compared."""
    p = formulation.problem
    transfers = [(t.source, _list(t.have), [(n, _list(w)) for n, w in t.readers], _list(t.prices)) for t in p.transfers]
    return [p.node_names, _lists(p.node_costs), p.edges, _lists(p.edge_costs), transfers, formulation.start]


def _lists(arrays: Sequence[np.ndarray]) -> list[Any]:
    return [_list(a) for a in arrays]


def _list(array: np.ndarray) -> Any:
    return array.tolist()
