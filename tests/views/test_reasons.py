"""Where collectives belong and why they run, under pins that say which kinds there are; groups, the timeline, the graph of modules."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.plans.plan_text import view_of
from fxshard.views.graph import dot, module_graph
from fxshard.views.plan_view import Collective, PlanView
from fxshard.views.reasons import reason, where
from fxshard.views.screen import grouped, head
from fxshard.views.timeline import plan_timeline, plan_trace
from fxshard.views.words import alike, layout_words, placements

MESH = fxshard.Mesh({"dp": 2, "tp": 2}, hardware="h100")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def view() -> PlanView:
    """Megatron on tp, and weights sharded on dp: the columns of up, the rows of down."""
    pins = {"layers.*.up.weight": "S(0)S(0)", "layers.*.down.weight": "S(0)S(1)", "layers.?": "S(0)R", "layers.*.up": "S(0)S(2)"}
    pins |= {"layers.*.down.inputs": "S(0)S(2)", "layers.*.down": "S(0)P"}
    return view_of(fxshard.plan(Net(), (torch.ones(8, 16, 64),), MESH, pins=pins, input_layouts="S(0)R", output_layouts="RR", cache=False))


def those(kind: str, axis: str) -> list[Collective]:
    return [c for c in view().collectives if (c.kind, c.axis) == (kind, axis)]


def test_weights_are_gathered_in_their_modules() -> None:
    gathered = [c for c in those("all_gather", "dp") if view().inputs.get(c.value, ("", ""))[0] == "parameter"]
    assert {where(view(), c).module for c in gathered} == {f"layers.{k}.{name}" for k in range(2) for name in ("up", "down")}
    assert {reason(view(), c).partition(", again")[0] for c in gathered} == {"the weight is kept as S(0), and used whole on dp"}


def told_of_buckets(hardware: str, word: str, **given: Any) -> str:
    mesh = fxshard.Mesh({"dp": 2}, hardware=hardware)
    plan = fxshard.plan(Net(), (torch.ones(8, 16, 64),), mesh, parallel={"dp": word}, cache=False, **given)
    return dict(head(view_of(plan))).get("buckets", "").partition(" cost ")[0]


def test_the_screen_says_where_starts_are_shared() -> None:
    """Only where no collective overlaps with compute, also if nothing is hidden, and the objective is a time."""
    assert told_of_buckets("cpu", "fsdp") == "gathers of parameters and reductions of gradients"
    assert told_of_buckets("cpu", "ddp") == "reductions of gradients"
    assert told_of_buckets("cpu", "fsdp", train=False) == "gathers of parameters"
    assert told_of_buckets("cpu", "ddp", train=False) == told_of_buckets("cpu", "fsdp", objective="communication") == ""
    assert told_of_buckets("h100", "fsdp") == told_of_buckets("h100", "ddp") == ""


def test_gradients_are_reduced_for_their_parameters() -> None:
    reduced = those("reduce_scatter", "dp")
    assert {where(view(), c) for c in reduced} == {(f"layers.{k}.{name}", True) for k in range(2) for name in ("up", "down")}
    assert {reason(view(), c) for c in reduced} == {"gradient: each rank summed over its part of the data; each keeps its S(0)"}


def test_partial_sums_of_tensor_parallelism() -> None:
    summed = [c for c in those("all_reduce", "tp") if not where(view(), c).backward]
    assert {where(view(), c).module for c in summed} >= {"layers.0.down"}
    assert all(reason(view(), c) == "partial sum: the dim summed over is sharded" for c in summed)


def test_alike_layers_are_one_row_and_nothing_is_lost() -> None:
    groups = grouped(view())
    assert sorted(c.number for found in groups for c in found) == list(range(len(view().collectives)))
    assert any(len(found) >= 4 for found in groups)
    costs = [sum(c.cost for c in found) for found in groups]
    assert costs == sorted(costs, reverse=True)


def test_the_timeline_is_as_long_as_the_objective() -> None:
    timeline = plan_timeline(view())
    assert timeline.total == pytest.approx(view().objective)
    assert timeline.waited == pytest.approx(sum(view().exposed.values()))
    ends: dict[str, float] = {}
    for event in timeline.events:
        if event.stream == "device":
            assert event.start >= ends.get("device", 0.0) - 1e-9
            ends["device"] = event.end
    assert {e["tid"] for e in plan_trace(view())["traceEvents"]} == {0, 1, 2}


def test_the_graph_of_modules() -> None:
    graph = module_graph(view())
    assert ("layers.*.up", "layers.*") in graph.edges and ("layers.*", "layers.*.down") in graph.edges
    assert graph.lines["layers.*.up"][:2] == ("layers.0-1.up", "S(0) on dp and tp")
    assert '"layers.*.down" -> "layers.*" [label=' in dot(graph)
    counts = [int(found or 1) for text in graph.edges.values() for found in re.findall(r"(?:(\d+) )?\w+ on \w+", text)]
    assert 0 < sum(counts) <= len(view().collectives)  # each at most once, whatever its number of readers


def test_words() -> None:
    assert alike(["layers.0.a.wq", "layers.1.a.wq", "layers.0.a.wk", "layers.1.a.wk", "norm"]) == ["layers.0-1.a.wq, wk", "norm"]
    assert placements("S(0:8+4)P(avg)R") == ["S(0:8+4)", "P(avg)", "R"]
    assert layout_words("S(1)RS(1)", ("a", "b", "c")) == "S(1) on a and c" and layout_words("RR", ("a", "b")) == "whole"
