"""Nodes made by ``new_node`` are those that ``Graph.create_node`` makes, names included."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from fxshard._torch_compat.nodes import new_node

NAMES = ("add", "add_1", "add_2", "mm", "mm_7", "mm_07", "x_1_2", "float", "None", "class_3", "1st", "a-b", "relu_", "_")


@pytest.mark.parametrize("seed", range(20))
def test_the_names_that_torch_gives(seed: int) -> None:
    draw, ours, theirs = random.Random(seed), fx.Graph(), fx.Graph()
    target = torch.ops.aten.add.Tensor
    for graph in (ours, theirs):
        graph.placeholder("add")
    for name in draw.choices(NAMES, k=60):
        reads = draw.randrange(len(ours.nodes)), draw.randrange(len(ours.nodes))
        mine, other = ([[*graph.nodes][k] for k in reads] for graph in (ours, theirs))
        new_node(ours, "call_function", target, tuple(mine), {"alpha": 2}, name)
        theirs.create_node("call_function", target, tuple(other), {"alpha": 2}, name=name)
    ours.lint()
    assert str(ours) == str(theirs) and len(ours.nodes) == len(theirs.nodes)
    assert [[u.name for u in n.users] for n in ours.nodes] == [[u.name for u in n.users] for n in theirs.nodes]
    assert len(ours.find_nodes(op="call_function", target=target)) == 60
    assert ours.call_function(target).name == theirs.call_function(target).name  # what torch names after ours


def test_a_graph_of_a_module_and_no_name() -> None:
    module = fx.GraphModule(torch.nn.Module(), fx.Graph())
    assert new_node(module.graph, "placeholder", "x", (), {}, None).name == "x"
    made = new_node(module.graph, "call_function", torch.relu, (next(iter(module.graph.nodes)),), {}, None)
    assert made.name == "relu" and made.args[0].name == "x"
