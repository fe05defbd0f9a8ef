"""``NodeMaker`` makes the nodes that ``Graph.create_node`` makes, with the same names."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from fxshard._torch_compat.nodes import NodeMaker, in_order

NAMES = ("add", "add_1", "add_2", "mm", "mm_7", "mm_07", "x_1_2", "float", "None", "class_3", "1st", "a-b", "relu_", "_")


@pytest.mark.parametrize("seed", range(20))
def test_nodes_and_names_equal_those_of_torch(seed: int) -> None:
    draw, ours, theirs = random.Random(seed), fx.Graph(), fx.Graph()
    target = torch.ops.aten.add.Tensor
    for graph in (ours, theirs):
        graph.placeholder("add")
    new = NodeMaker(ours)
    drawn = draw.choices(NAMES, k=60)
    for name in drawn:
        reads = draw.randrange(len(ours.nodes)), draw.randrange(len(ours.nodes))
        mine, other = ([[*graph.nodes][k] for k in reads] for graph in (ours, theirs))
        new("call_function", target, tuple(mine), {"alpha": 2}, name, {"val": name})
        theirs.create_node("call_function", target, tuple(other), {"alpha": 2}, name=name)
    ours.lint()
    assert [n.meta for n in ours.nodes][1:] == [{"val": name} for name in drawn]
    assert str(ours) == str(theirs) and len(ours.nodes) == len(theirs.nodes)
    assert [[u.name for u in n.users] for n in ours.nodes] == [[u.name for u in n.users] for n in theirs.nodes]
    assert len(ours.find_nodes(op="call_function", target=target)) == 60
    assert ours.call_function(target).name == theirs.call_function(target).name  # names that torch gives afterwards


def test_a_graph_of_a_module_and_no_name() -> None:
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    new = NodeMaker(module.graph)
    assert new("placeholder", "x", (), {}, None).name == "x"
    made = new("call_function", torch.relu, (next(iter(module.graph.nodes)),), {}, None)
    assert made.name == "relu" and made.args[0].name == "x"


def test_in_order() -> None:
    """Refuses what ``lint`` refuses: a node read before it is made, a node of another graph, two nodes of one name."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = graph.call_function(torch.relu, (x,)), graph.call_function(torch.relu, (x,))
    two.args = (one,)
    assert in_order(graph)
    one.prepend(two)
    assert not in_order(graph)
    one.append(two)
    assert in_order(graph)
    two.name = one.name
    assert not in_order(graph)
    other = fx.Graph()
    other.call_function(torch.relu, (x,))
    assert not in_order(other)
