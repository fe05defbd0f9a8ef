"""Nodes that look the same share one call object; nodes that a rule could tell apart do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.graph.call import Operand, call_of
from fxshard.graph.planning_graph import UNKNOWN

aten = torch.ops.aten


def node_of(target: Any, values: list[torch.Tensor], *rest: Any) -> fx.Node:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(values))]
    for node, value in zip(given, values, strict=True):
        node.meta["val"] = value
    node = graph.call_function(target, (*given, *rest))
    node.meta["val"] = target(*values, *rest)
    return node


def test_equal_nodes_share_one_call() -> None:
    one, other = (node_of(aten.add.Tensor, [torch.ones(2, 3), torch.zeros(3)]) for _ in range(2))
    assert call_of(one) is call_of(other)
    assert call_of(one).args == (Operand(0), Operand(1)) and call_of(one).operands[1].shape == (3,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.ones(2, 3), 1), (torch.ones(2, 3), True)),
        ((torch.ones(2, 3), 1), (torch.ones(2, 3), 1.0)),
        ((torch.ones(2, 3), 1), (torch.ones(3, 2), 1)),
        ((torch.ones(2, 3), 1), (torch.ones(2, 3, dtype=torch.float64), 1)),
    ],
)
def test_different_nodes_have_different_calls(one: tuple[torch.Tensor, Any], other: tuple[torch.Tensor, Any]) -> None:
    a, b = (call_of(node_of(aten.mul.Tensor, [value], constant)) for value, constant in (one, other))
    assert a is not b
    assert (a.operands, [*map(type, a.args)]) != (b.operands, [*map(type, b.args)])


def test_a_changed_operand_gives_a_new_call() -> None:
    node = node_of(aten.neg.default, [torch.ones(2, 3)])
    before = call_of(node)
    (given,) = node.all_input_nodes
    given.meta["val"] = node.meta["val"] = torch.ones(4)
    assert before.operands[0].shape == (2, 3) and call_of(node).operands[0].shape == (4,)


def test_data_dependent_sizes_are_unknown() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        found = [torch.ones(5).nonzero() for _ in range(2)]
        calls = [call_of(node_of(aten.neg.default, [value])) for value in found]
    for call in calls:
        assert call.operands[0].shape == (UNKNOWN, 1) and call.outputs[0] == call.operands[0]
