"""The steps of Dynamo that a capture skips do not change the graph. Only while passes run does the garbage collector run less often."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fxshard._torch_compat.dynamo.capture import without_guards
from fxshard.collecting import COLLECT_EVERY, few_collections
from fxshard.graph.planning_graph import PlanningGraph, source_line
from fxshard.passes.runner import Pass, PassRecord, run_passes
from fxshard.passes.trace import trace as module
from fxshard.passes.trace.trace import trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.second(self.first(x).relu()), x[1:]


def traced() -> PlanningGraph:
    return trace(Net(), (torch.randn(4, 8),))


def test_same_graph_with_guards_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced()
    monkeypatch.setattr(module, "without_guards", contextlib.nullcontext)
    monkeypatch.setattr(module, "without_code", contextlib.nullcontext)
    whole = traced()
    assert graph.hash == whole.hash and graph.module.code == whole.module.code
    assert [source_line(n) for n in graph.nodes] == [source_line(n) for n in whole.nodes]


def test_no_guards_are_built_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.guards as guards

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("guards were built")

    monkeypatch.setattr(guards.CheckFunctionManager, "__init__", refuse)
    traced()
    monkeypatch.setattr(module, "without_guards", contextlib.nullcontext)
    with pytest.raises(Exception, match="guards were built"):
        traced()


def test_torch_compile_builds_guards_as_before() -> None:
    with without_guards():
        pass
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [1, 1] and compiled(torch.zeros(3)).tolist() == [1, 1, 1]


@dataclass(frozen=True)
class Seen:
    threshold: tuple[int, ...] = ()
    records: tuple[PassRecord, ...] = ()


def test_garbage_collections_are_rarer_only_during_a_pass() -> None:
    def look(_: Seen) -> tuple[Seen, str]:
        return Seen(gc.get_threshold()), ""

    def fail(_: Seen) -> tuple[Seen, str]:
        raise ValueError

    before = gc.get_threshold()
    state = run_passes((Pass("look", look, str),), Seen(), dump=False)
    assert state.threshold == (COLLECT_EVERY, *before[1:]) and gc.get_threshold() == before
    with pytest.raises(ValueError):
        run_passes((Pass("fail", fail, str),), Seen(), dump=False)
    assert gc.get_threshold() == before


@pytest.mark.parametrize("own", [0, 1_000_000], ids=["off", "rarer"])
def test_a_users_rarer_collections_are_left_alone(own: int) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(own)
        with few_collections():
            assert gc.get_threshold()[0] == own
        assert gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)
