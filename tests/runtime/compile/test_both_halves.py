"""The order in which a rank compiles forward and backward: the backward first if another rank compiles the forward.

It is compiled again if the forward then gives values with other strides than the graph has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxshard.runtime.compile import compile
from fxshard.runtime.rank_graph.partition import Partition

GRAPH, OTHER = (6, 1), (1, 4)
"""Strides of the one saved value: in the graph, and as Inductor might choose them."""


class Code:
    """The result of ``_compile_graph`` for a half; ``strides``: for which it was compiled."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        self.output_strides: list[Any] = [None, strides]
        self.strides = strides


def halves() -> Partition:
    """A forward with one result and one saved value of shape (4, 6), which the backward reads and returns."""
    with FakeTensorMode():
        value = torch.empty(4, 6)
    graphs = []
    for count in (2, 1):
        graph = fx.Graph()
        node = graph.placeholder("kept")
        node.meta["val"] = value
        graph.output((node,) * count)
        graphs.append(fx.GraphModule(torch.nn.Module(), graph))
    return Partition(graphs[0], graphs[1], (), 1)


def made(
    monkeypatch: pytest.MonkeyPatch, busy: set[str], strides: tuple[int, ...] = GRAPH, dynamic: bool = False
) -> tuple[list[tuple[str, bool]], Any]:
    """Compiles both halves, of which another rank is compiling ``busy``.

    Returns the calls in order, as (half, whether it waits), and the code of the backward.
    """
    asked: list[tuple[str, bool]] = []

    def run(module: fx.GraphModule, compiler: str, visible: int, *, wait: bool = True, is_backward: bool = False, **kind: bool) -> Any:
        name = "backward" if is_backward else "forward"
        asked.append((name, wait))
        (node,) = module.graph.find_nodes(op="placeholder")
        if name in busy and not wait:
            return None
        return Code(tuple(node.meta["val"].stride()) if is_backward else strides)

    monkeypatch.setattr(compile, "_compile_graph", run)
    return asked, compile._compile_halves(halves(), "inductor", 1, 1, dynamic)[1]


def test_alone_forward_then_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, set(), OTHER)
    assert asked == [("forward", False), ("backward", True)] and backward.strides == OTHER


def test_if_another_rank_compiles_the_forward_the_backward_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"})
    assert asked == [("forward", False), ("backward", False), ("forward", True)] and backward.strides == GRAPH


def test_a_backward_compiled_for_wrong_strides_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"}, OTHER)
    assert asked == [("forward", False), ("backward", False), ("forward", True), ("backward", True)] and backward.strides == OTHER


def test_if_others_compile_both_halves_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward", "backward"})
    assert asked == [("forward", False), ("backward", False), ("forward", True), ("backward", True)] and backward.strides == GRAPH


def test_with_dynamic_sizes_strides_stay_those_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"}, OTHER, dynamic=True)
    assert asked == [("forward", False), ("backward", False), ("forward", True)] and backward.strides == GRAPH
