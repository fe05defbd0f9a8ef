"""A cached function of a node's target is called once for each target; nodes have the names that torch gives them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxshard._torch_compat.nodes import NodeMaker
from fxshard.graph.targets import cached_by_target, name_of, target_id
from fxshard.passes.lowering.local_graph import call_prefix

aten = torch.ops.aten


def test_a_cached_function_is_called_once_for_each_target() -> None:
    asked: list[Any] = []
    ask = cached_by_target(lambda target: asked.append(target) or len(asked))
    assert [ask(t) for t in (aten.mm.default, aten.add.Tensor, aten.mm.default)] == [1, 2, 1]
    assert asked == [aten.mm.default, aten.add.Tensor]


def test_targets_are_told_apart_by_identity_and_kept() -> None:
    """Targets that compare equal have different ids. A target is kept alive, so that its id is never given to another."""

    class Same:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    assert len({target_id(Same()) for _ in range(100)}) == 100


def test_names_are_the_str_of_the_target() -> None:
    for target in (aten.mm.default, aten.sum.dim_IntList, torch.ops._c10d_functional.wait_tensor.default, operator.getitem, "forward"):
        assert name_of(target) == name_of(target) == str(target)


TARGETS: tuple[Callable[..., Any], ...] = (
    *(aten.mul.Tensor, aten.sum.default, aten.slice.Tensor, aten.log1p.default, aten._to_copy.default, torch.ops.fxshard.einsum.default),
    *(operator.getitem, torch.relu, torch.nn.functional.conv2d, len, sum),
)


@pytest.mark.parametrize("target", TARGETS, ids=range(len(TARGETS)))
def test_calls_have_the_names_that_fx_would_give(target: Callable[..., Any]) -> None:
    """Four nodes in a graph whose input already has one of the names. The new nodes are users of their arguments."""
    mine, theirs = fx.Graph(), fx.Graph()
    taken = f"{fx.Graph().create_node('call_function', target).name}_2"
    given = [graph.placeholder(taken) for graph in (mine, theirs)]
    new = NodeMaker(mine)
    made = [new("call_function", target, (given[0],), {"k": given[0]}, call_prefix(target)) for _ in range(4)]
    assert [n.name for n in made] == [theirs.create_node("call_function", target).name for _ in range(4)]
    assert set(given[0].users) == set(made) and made[0].args == (given[0],) and made[0].kwargs == {"k": given[0]}
