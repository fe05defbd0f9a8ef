"""Attributes that a forward sets, as the trace records them: their new values, and the old values on which the program depends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.graph.side_effects import SideEffects
from fxshard.passes.trace.trace import trace
from fxshard.shapes import DynamicDim

X = torch.ones(4, 3)


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.k, self.n, self.mode, self.kept = body, 5, 0, "new", None
        self.items, self.table = [7], {"a": 1}
        self.up = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def graph_of(body: Callable[[Any, Tensor], Tensor], *dims: DynamicDim, **options: Any) -> PlanningGraph:
    return trace(Net(body), (X,), train=False, dynamic=dims, observe=True, **options)


def effects_of(body: Callable[[Any, Tensor], Tensor], *dims: DynamicDim, **options: Any) -> SideEffects:
    effects = graph_of(body, *dims, **options).side_effects
    assert effects is not None
    return effects


def after(effects: SideEffects, *outputs: Tensor, **sizes: int) -> Net:
    """A module with k = 100, after the effects of a run were applied to it."""
    model = Net(lambda self, x: x)
    model.k = 100
    effects.apply([*model.modules()], outputs, sizes, torch.device("cpu"))
    return model


def names(attributes: Any) -> set[str]:
    return {name for _, name in attributes}


def counted(self: Any, x: Tensor) -> Tensor:
    self.k += 2
    self.n = self.k * 3 - 1
    return self.up(x)


def test_a_number_that_nothing_depends_on_is_an_expression_of_its_old_value() -> None:
    effects = effects_of(counted)
    assert names(effects.unread) == {"k", "n"} and not effects.read and not effects.reads
    model = after(effects)
    assert (model.k, model.n) == (102, 305)
    assert effects.serves([{"k": 3}]) and not effects.serves([{"k": "three"}])


def in_an_operator(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    return self.up(x) * self.k


def in_a_branch(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    return x if self.k > 100 else self.up(x)


def in_a_size(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    return self.up(x) + torch.zeros(self.k, 1, 1).sum()


def in_a_text(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    self.mode = f"step {self.k}"
    return self.up(x)


def in_a_number(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    return self.up(x) * float(self.k)


def in_a_list(self: Any, x: Tensor) -> Tensor:
    self.k += 1
    self.items.append(self.k)
    return self.up(x)


@pytest.mark.parametrize("body", [in_an_operator, in_a_branch, in_a_size, in_a_text, in_a_number, in_a_list])
def test_a_number_that_the_graph_depends_on_is_listed_with_its_line(body: Callable[..., Tensor]) -> None:
    effects = effects_of(body)
    ((_, path, where),) = effects.read
    assert path == "k" and where == f"{__file__}:{body.__code__.co_firstlineno + 1}"
    assert "k" not in names(effects.unread) and after(effects).k == 6


def remembered(self: Any, x: Tensor) -> Tensor:
    y = self.up(x)
    self.kept = (y, x.shape[0], self.mode)
    self.items.append(y * 2)
    self.table["b"] = y * 3
    self.mode = "old"
    return y.relu()


def test_tensors_become_outputs_and_containers_are_extended() -> None:
    graph = graph_of(remembered, DynamicDim("rows", (("args[0]", 0),), 4, 1, None))
    effects = graph.side_effects
    assert effects is not None and len(graph.outputs) == 4
    assert names(effects.unread) == {"kept", "items", "table"} and [path for _, path, _ in effects.read] == ["mode"]
    values = {read: torch.full((), float(i)) for i, read in enumerate(effects.reads)}
    model = after(effects, *values.values(), rows=9)
    assert model.kept == (values[0, (("attr", "kept"), ("item", 0))], 9, "new") and model.mode == "old"
    assert model.items == [7, values[0, (("attr", "items"), ("item", -1))]]
    assert model.table == {"a": 1, "b": values[0, (("attr", "table"), ("item", "b"))]}


def looked_into(self: Any, x: Tensor) -> Tensor:
    self.items.append(len(self.items))
    return self.up(x)


def test_a_list_that_the_forward_reads_is_left_unchanged_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxshard"):
        assert not effects_of(looked_into).writes
    assert "changes Python objects (self.items); the sharded model leaves them" in caplog.text


def test_attributes_that_other_calls_set_are_included() -> None:
    def reads(self: Any, x: Tensor) -> Tensor:
        return self.up(x) * self.k

    written = {(0, "k"), (0, "n")}
    effects = effects_of(reads, written=written)
    assert not effects.writes and names(effects.unread) == {"n"} and [a for a, *_ in effects.read] == [(0, "k")]
    assert graph_of(reads).side_effects is None


def test_a_plan_leaves_out_side_effects_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxshard"):
        graph = trace(Net(remembered), (X,), train=False)
    assert graph.side_effects is None and len(graph.outputs) == 1 and "keep its counts and state" in caplog.text
