"""Who compiles which half: the backward first where another has the forward, and again where the forward lays values out otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxshard.runtime.compile import compile
from fxshard.runtime.rank_graph.partition import Partition

GRAPH, OTHER = (6, 1), (1, 4)
"""Strides of the one value that is kept, as the graph has it and as Inductor might lay it out."""


class Code:
    """What ``_compile_graph`` gives for a half; its ``strides`` are those that the backward was compiled for."""

    def __init__(self, strides: tuple[int, ...]) -> None:
        self.output_strides: list[Any] = [None, strides]
        self.strides = strides


def halves() -> Partition:
    """A forward of one result and one kept value of shape (4, 6), which the backward reads and returns."""
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
    """The halves asked for in turn, each with whether it would wait, and the backward that came of it; ``busy``: what others compile."""
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


def test_where_the_forward_is_taken_the_backward_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"})
    assert asked == [("forward", False), ("backward", False), ("forward", True)] and backward.strides == GRAPH


def test_what_was_expected_wrongly_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"}, OTHER)
    assert asked == [("forward", False), ("backward", False), ("forward", True), ("backward", True)] and backward.strides == OTHER


def test_where_both_are_taken_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward", "backward"})
    assert asked == [("forward", False), ("backward", False), ("forward", True), ("backward", True)] and backward.strides == GRAPH


def test_dynamic_sizes_lie_as_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = made(monkeypatch, {"forward"}, OTHER, dynamic=True)
    assert asked == [("forward", False), ("backward", False), ("forward", True)] and backward.strides == GRAPH
