"""Constraints: every form in which they can be given, and what they bind."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from passes.constrained import PAIR, L, getitems, graph, planned
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard.layout.layouts import Layout
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan


def results(plan: ShardingPlan) -> dict[str, Layout]:
    """Layouts of the outputs by name."""
    return {o.name: layout for o, layout in zip(plan.outputs, plan.specs["output"].inputs, strict=True) if o.kind == "output"}


SAME = ["S(0)R", (Shard(0), Replicate()), [Shard(0), Replicate()], L("S(0)R"), {"dp": Shard(0), "tp": Replicate()}]


@pytest.mark.parametrize("given", SAME)
def test_one_layout_for_all(given: Any) -> None:
    plan = planned(input_layouts=given, output_layouts=given)
    assert plan.layout_of("args[0]") == plan.layout_of("args[1]") == L("S(0)R")
    assert results(plan) == {"outputs[0]": L("S(0)R"), "outputs[1]": L("S(0)R")}


def test_none_in_a_sequence_leaves_a_layout_free() -> None:
    """The free layouts are the cheapest ones."""
    plan = planned(input_layouts=["S(1)S(0)", None], output_layouts=(None, "S(-1)R"))
    assert plan.layout_of("args[0]") == L("S(1)S(0)")
    assert results(plan)["outputs[1]"] == L("S(2)R")


def test_a_mapping_by_name_leaves_the_others_and_the_axes_not_named_free() -> None:
    plan = planned(input_layouts={"args[1]": {"tp": Shard(2)}, "args[0]": None}, output_layouts={"outputs[0]": {"dp": Shard(1)}})
    assert plan.layout_of("args[1]")[1] == Shard(2)
    assert results(plan)["outputs[0]"][0] == Shard(1)


def test_axes_left_free_in_one_layout_for_all() -> None:
    plan = planned(input_layouts={"tp": Shard(1)}, output_layouts={"tp": Replicate()})
    assert plan.layout_of("args[0]")[1] == plan.layout_of("args[1]")[1] == Shard(1)
    assert {layout[1] for layout in results(plan).values()} == {Replicate()}


@pytest.mark.parametrize(
    ("pin", "named"),
    [
        ("up.weight", ["up.weight"]),
        ("*.bias", ["up.bias", "down.bias"]),
        ("*own.w*", ["down.weight"]),
        ("head.weight", ["embed.weight"]),
        ("embed.weight", ["embed.weight"]),
        ("args[1]", ["args[1]"]),
        ("embedding", ["embedding"]),
        ("silu*", ["silu"]),
    ],
)
@pytest.mark.parametrize("layout", ["RS(0)", {"tp": Shard(0)}, (None, Shard(0))], ids=str)
def test_pins_by_name_glob_alias_and_node(pin: str, named: list[str], layout: Any) -> None:
    plan = planned(pins={pin: layout})
    for name in named:
        assert plan.layout_of(name)[1] == Shard(0)
        assert layout != "RS(0)" or plan.layout_of(name) == L("RS(0)")


def test_pins_on_one_output_of_an_operator() -> None:
    plan = planned(pins={getitems()[1]: "S(0)S(1)"})
    producer = graph().by_name[getitems()[1]].args[0]
    assert plan.specs[producer.name].outputs[1] == L("S(0)S(1)")


def test_a_pending_sum_can_be_pinned() -> None:
    node = next(n.name for n in graph().nodes if "einsum" in n.name)
    assert planned(PAIR, pins={node: [Partial()]}).layout_of(node) == L("P")


def test_a_gradient_has_the_layout_of_its_parameter() -> None:
    plan = planned(pins={"down.weight": "S(0)S(1)"})
    index = next(k for k, o in enumerate(plan.outputs) if (o.kind, o.name) == ("gradient", "down.weight"))
    assert plan.specs["output"].inputs[index] == L("S(0)S(1)")


def test_a_gradient_may_be_returned_whole_though_its_input_is_sharded() -> None:
    """It is gathered in the plan, at a price; the plan given as pins says so too."""
    traced = trace(nn.Linear(6, 4), (torch.ones(8, 6, requires_grad=True),))
    at = [(o.kind, o.name) for o in traced.outputs].index(("gradient", "args[0]"))
    asked = Request(input_layouts="S(0)", output_layouts="S(0)")
    whole = dataclasses.replace(asked, returned_whole=frozenset(["args[0]"]))
    plans = [plan_graph(traced, PAIR, request) for request in (asked, whole)]
    assert [plan.specs["output"].inputs[at] for plan in plans] == [L("S(0)"), L("R")]
    assert plans[1].layout_of("args[0]") == L("S(0)") and plans[1].objective > plans[0].objective
    for plan in plans:
        assert plan_graph(traced, PAIR, dataclasses.replace(asked, pins=plan)).to_json() == plan.to_json()


def test_a_plan_as_pins_is_kept_and_the_rest_filled_in() -> None:
    free = planned(PAIR)
    some = tuple(n for n in free.nodes if n.name in ("embed_weight", "up_weight"))
    other = tuple(dataclasses.replace(n, spec=OpSpec((), (L("S(1)"),))) for n in some)
    partial = ShardingPlan(PAIR, True, "", other, partial=True)
    plan = planned(PAIR, pins=partial)
    assert plan.layout_of("embed.weight") == plan.layout_of("up.weight") == L("S(1)")
    assert not plan.partial and len(plan.nodes) == len(free.nodes) and plan.objective >= free.objective
    again = planned(PAIR, pins=plan)
    assert again.to_json() == plan.to_json()


@pytest.mark.parametrize(
    "given", [("S(0)S(1)", None), (None, {"tp": Shard(1), "dp": Shard(0)}), "S(0)S(1), *", ["S(0)S(1)", L("S(0)S(1)")]]
)
@pytest.mark.parametrize("name", ["split", "spl*"])
def test_a_node_with_several_results_takes_a_layout_for_each(name: str, given: Any) -> None:
    """The name is that in the plan, or a glob. A free result takes the cheapest layout."""
    pinned = graph().by_name[getitems()[0]].args[0]
    name = name.replace("split", str(pinned)).replace("spl", str(pinned)[:3])
    assert planned(pins={name: given}).specs[str(pinned)].outputs == (L("S(0)S(1)"),) * 2


def test_a_pin_on_one_of_several_results_binds_that_one() -> None:
    """The others stay free. It may be a result that nothing reads, which has no node of its own."""
    conv, x = nn.Conv1d(4, 6, 3), torch.ones(2, 4, 8, requires_grad=True)
    pinned = plan_graph(trace(conv, (x,)), PAIR, Request(pins={"convolution_backward": (None, "S(0)", None)}))
    assert pinned.specs["convolution_backward"].outputs == (L("P"), L("S(0)"), L("S(0)"))
    traced = trace(Top(), (torch.ones(4, 6),), train=False)
    pinned = plan_graph(traced, PAIR, Request(pins={"topk": (None, "S(0)")}, train=False))
    assert pinned.specs["topk"].outputs == (L("S(0)"), L("S(0)"))


class Top(nn.Module):
    """Nothing reads the indices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.topk(2, 1)[0]
