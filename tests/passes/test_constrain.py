"""Constraints: every form that they are given in, what they bind, and what is said of those that cannot be."""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F

import fxshard
from fxshard.errors import ConstraintError, FxshardError, LayoutError, OptionError, PlanError
from fxshard.layout import Layout
from fxshard.mesh import Mesh
from fxshard.passes.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace import trace
from fxshard.planning_graph import PlanningGraph
from fxshard.sharding_plan import OpSpec, PlannedNode, ShardingPlan
from fxshard.solver import NoPlanError

L = Layout.parse
MESH, PAIR = Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2})


class Net(nn.Module):
    """Two inputs, a tied embedding, a split (so that there are getitems), two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, value = self.up(self.embed(tokens) * scale).split(16, -1)
        hidden = self.down(F.silu(gate) * value)
        return self.head(hidden), hidden


@lru_cache
def graph() -> PlanningGraph:
    return trace(Net(), (torch.zeros(4, 6, dtype=torch.int64), torch.ones(4, 6, 8)))


def planned(mesh: Mesh = MESH, **request: Any) -> ShardingPlan:
    plan = plan_graph(graph(), mesh, Request(**request))
    assert 0 <= plan.gap <= 1e-8
    return plan


def results(plan: ShardingPlan) -> dict[str, Layout]:
    """Layouts of the outputs by name."""
    return {o.name: layout for o, layout in zip(plan.outputs, plan.specs["output"].inputs, strict=True) if o.kind == "output"}


SAME = ["S(0)R", (Shard(0), Replicate()), [Shard(0), Replicate()], L("S(0)R"), {"dp": Shard(0), "tp": Replicate()}]


@pytest.mark.parametrize("given", SAME)
def test_one_layout_for_all(given: Any) -> None:
    plan = planned(input_layouts=given, output_layouts=given)
    assert plan.layout_of("args[0]") == plan.layout_of("args[1]") == L("S(0)R")
    assert results(plan) == {"outputs[0]": L("S(0)R"), "outputs[1]": L("S(0)R")}


def test_a_sequence_leaves_none_free() -> None:
    """Free inputs follow what is cheapest, here that of the other."""
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


def getitems() -> list[str]:
    return [n.name for n in graph().nodes if n.name.startswith("getitem")]


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


def test_a_pending_sum_can_be_asked_for() -> None:
    node = next(n.name for n in graph().nodes if "einsum" in n.name)
    assert planned(PAIR, pins={node: [Partial()]}).layout_of(node) == L("P")


def test_a_gradient_lies_as_its_parameter() -> None:
    plan = planned(pins={"down.weight": "S(0)S(1)"})
    index = next(k for k, o in enumerate(plan.outputs) if (o.kind, o.name) == ("gradient", "down.weight"))
    assert plan.specs["output"].inputs[index] == L("S(0)S(1)")


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


def wrong(error: type[FxshardError], what: str, remedy: str, mesh: Mesh = MESH, **request: Any) -> FxshardError:
    with pytest.raises(error) as caught:
        planned(mesh, **request)
    assert re.search(what, caught.value.what), caught.value.what
    assert re.search(remedy, caught.value.remedy or ""), caught.value.remedy
    assert caught.value.where
    return caught.value


def test_unknown_axes() -> None:
    named = "no axis 'tpp'; did you mean 'tp'"
    wrong(LayoutError, named, "dp, tp", pins={"up.weight": {"tpp": Shard(0)}})
    wrong(LayoutError, named, "dp, tp", input_layouts={"args[0]": {"tpp": Shard(0)}})
    wrong(LayoutError, named, "dp, tp", output_layouts={"tpp": Shard(0)})


def test_dims_out_of_range_and_wrong_lengths() -> None:
    wrong(LayoutError, r"dim 2 in S\(2\) .*up.weight.* has 2 dims", "0 to 1", pins={"up.weight": "RS(2)"})
    wrong(LayoutError, r"dim -4 .*input args\[1\], which has 3 dims", "0 to 2", input_layouts=[None, "S(-4)R"])
    wrong(LayoutError, r"dim 3 .*output outputs\[1\]", "0 to 2", output_layouts={"outputs[1]": "S(3)R"})
    short = r"R of 'up.weight' \(up_weight\) has 1 placements, the mesh has 2 axes \(dp=2,tp=2\)"
    wrong(LayoutError, short, "one placement per mesh axis", pins={"up.weight": "R"})
    wrong(LayoutError, r"cannot read layout", r"write 'RS\(0\)'", pins={"up.weight": 3})
    wrong(LayoutError, r"cannot read layout 'RX' at position 1", "one of R", pins={"up.weight": "RX"})
    wrong(LayoutError, r"unknown reduction 'mean'", "sum", pins={"silu": "RP(mean)"})


def test_names_that_match_nothing_have_the_closest_named() -> None:
    wrong(ConstraintError, "pin 'up.wieght' matches no", "'up.weight'", pins={"up.wieght": "RR"})
    wrong(ConstraintError, r"pin 'layers\.\*' matches no", "inspect --nodes", pins={"layers.*": "RR"})
    wrong(ConstraintError, r"input_layouts names 'args\[2\]'.*none of args\[0\], args\[1\]", r"'args\[", input_layouts={"args[2]": "RR"})
    wrong(ConstraintError, "output_layouts names 'output'", r"'outputs\[", output_layouts={"output": "RR"})
    wrong(ConstraintError, "input_layouts has 3 layouts for 2 tensors", r"args\[0\], args\[1\]", input_layouts=["RR", None, None])


def test_layouts_that_cannot_be_had() -> None:
    error = wrong(ConstraintError, r"pins\['embed.weight'\]='RP' cannot hold", r"can give .*S\(0\)", pins={"embed.weight": "RP"})
    assert "embed.weight" in error.where
    wrong(ConstraintError, r"output_layouts\[outputs\[0\]\]='RP' cannot hold", "not partial", output_layouts={"outputs[0]": "RP"})
    assert "test_constrain.py" in wrong(ConstraintError, r"pins\['silu'\]='RP'", "can give", pins={"silu": "RP"}).where


def contradiction(**request: Any) -> set[str]:
    error = wrong(ConstraintError, "cannot hold together: ", "remove or change one", **request)
    return set(error.what.split("together: ")[1].split("; "))


def test_contradictions_name_a_smallest_set_of_the_users_own() -> None:
    """What has no part in it is not named."""
    beside = {"down.*": "RR", "silu": "S(0)R"}
    twice = {"up.weight": "S(0)R", "up.*ght": "S(1)R"}
    assert contradiction(pins=twice | beside) == {"pins['up.weight']='S(0)R'", "pins['up.*ght']='S(1)R'"}
    tied = {"head.weight": "RS(0)", "embed.weight": "RS(1)"}
    assert contradiction(pins=tied | beside) == {"pins['head.weight']='RS(0)'", "pins['embed.weight']='RS(1)'"}
    named = {"pins['args[0]']='RR'", "input_layouts[args[0]]='S(0)R'"}
    assert contradiction(pins={"args[0]": "RR", **beside}, input_layouts=["S(0)R", None], output_layouts="RR") == named
    both = "pins['*up.bias']={dp: S(0)}", "pins['up.b*']={dp: R}"
    assert contradiction(pins={"*up.bias": {"dp": Shard(0)}, "up.b*": {"dp": Replicate()}, "down.bias": "RR"}) == set(both)


def test_contradictions_across_nodes() -> None:
    """A tangent lies as its output: the pin on the one and the layout of the other meet only there."""
    tangent = graph().inputs_of("tangent")[0].node
    pins = {tangent: "S(0)R", "up.weight": "S(0)R"}
    assert contradiction(pins=pins, output_layouts=["RR", None]) == {f"pins['{tangent}']='S(0)R'", "output_layouts[outputs[0]]='RR'"}


def test_contradictions_with_a_plan_name_its_node() -> None:
    free = planned(PAIR)
    nodes = tuple(dataclasses.replace(n, spec=OpSpec((), (L("R"),))) for n in free.nodes if n.name == "args_1")
    partial = ShardingPlan(PAIR, True, "", nodes, partial=True)
    said = contradiction(mesh=PAIR, pins=partial, input_layouts=[None, "S(0)"])
    assert said == {"args_1:  -> R of the plan given as pins", "input_layouts[args[1]]='S(0)'"}
    said = contradiction(mesh=PAIR, pins=planned(PAIR, output_layouts="R"), output_layouts=[None, "S(0)"])
    assert said == {"output outputs[1]: R of the plan given as pins", "output_layouts[outputs[1]]='S(0)'"}


def test_plans_for_another_model_or_mesh() -> None:
    plan = planned(PAIR)
    wrong(ConstraintError, "for mesh tp=2, not dp=2,tp=2", "plan for this mesh", pins=plan)
    other = trace(nn.Linear(4, 4), (torch.ones(2, 4),))
    with pytest.raises(ConstraintError) as caught:
        plan_graph(other, PAIR, Request(pins=plan))
    assert "another" in caught.value.what and caught.value.where and caught.value.remedy
    with pytest.raises(PlanError, match=r"for another graph \(hash [\s\S]*plan again") as refused:
        lower(other, plan)
    assert refused.value.where


def test_nodes_and_specs_of_a_partial_plan_that_cannot_be() -> None:
    def partial(name: str, inputs: tuple[str, ...], *outputs: str) -> ShardingPlan:
        spec = OpSpec(tuple(map(L, inputs)), tuple(map(L, outputs)))
        return ShardingPlan(PAIR, True, "", (PlannedNode(name, "", spec, (), ()),), partial=True)

    wrong(ConstraintError, "names node 'up_wieght'", "'up_weight'", PAIR, pins=partial("up_wieght", (), "R"))
    wrong(ConstraintError, f"names '{getitems()[0]}', one output", "name split", PAIR, pins=partial(getitems()[0], (), "R"))
    wrong(LayoutError, r"dim 5 in S\(5\)", "0 to 1", PAIR, pins=partial("up_weight", (), "S(5)"))
    illegal = r"gives silu \(aten.silu.default\) the spec P -> P, which is not legal"
    error = wrong(ConstraintError, illegal, "legal ones are R -> R", PAIR, pins=partial("silu", ("P",), "P"))
    assert "test_constrain.py" in str(error.where)
    long = partial("silu", ("R", "R"), "R")
    wrong(ConstraintError, "silu the spec .*, but it has 1 operands and 1 outputs", "layout for each", PAIR, pins=long)
    pending = partial("output", ("P", *"RRRRRR"))
    wrong(ConstraintError, r"output outputs\[0\]: P of the plan.* cannot hold", "not partial", PAIR, pins=pending)
    apart = partial("output", ("R", "R", "S(0)", *"RRRR"))
    mixed = dataclasses.replace(apart, nodes=(*apart.nodes, *partial("embed_weight", (), "R").nodes))
    wrong(ConstraintError, r"gradient embed.weight: S\(0\) of the plan.*; embed_weight:  -> R of the plan", "remove", PAIR, pins=mixed)


def test_memory_limits() -> None:
    """Bytes of all parameters and gradients; on two ranks the least is half of them."""
    whole = 4 * 2 * (16 * 8 + 32 * 8 + 32 + 16 * 8 + 8)
    error = wrong(ConstraintError, "nothing fits in memory_limit=100 bytes", f"least found is {whole // 4} bytes", memory_limit=100)
    assert "dp=2,tp=2" in str(error.where)
    assert sum(planned(PAIR, memory_limit=whole // 2).memory.values()) == whole // 2
    assert planned(PAIR, memory_limit=whole).objective == planned(PAIR).objective
    pins = {"*.weight": "R"}
    least = whole - 4 * 2 * (32 + 8) // 2
    wrong(ConstraintError, "nothing fits", f"least found is {least} bytes", PAIR, memory_limit=whole // 2, pins=pins)
    wrong(OptionError, "memory_limit='2GB'", "bytes per device", memory_limit="2GB")
    wrong(OptionError, "memory_limit=-1", "bytes per device", memory_limit=-1)
    wrong(OptionError, "memory_limit=nan", "bytes per device", memory_limit=float("nan"))


def test_a_search_that_ends_without_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found(*_: object, **__: object) -> None:
        raise NoPlanError("the time limit ended the search")

    monkeypatch.setattr("fxshard.passes.choose.solve", none_found)
    wrong(ConstraintError, "no plan was found in time", "give more seconds", PAIR, time_limit=1e-3)


@pytest.mark.parametrize("limit", [0, -1.0, "1", float("nan")])
def test_time_limits_that_are_none(limit: Any) -> None:
    wrong(OptionError, "time_limit=", "seconds", time_limit=limit)


@pytest.mark.parametrize("pins", [["up.weight"], "RS(0)", {3: "RR"}])
def test_pins_that_are_no_mapping(pins: Any) -> None:
    wrong(OptionError, "cannot read pins=", r"'layers.\*.weight': 'RS\(0\)'", pins=pins)


def test_a_layout_asked_of_a_plan_by_a_name_that_it_lacks() -> None:
    with pytest.raises(PlanError, match=r"no input or node 'up\.wieght'") as error:
        planned(PAIR).layout_of("up.wieght")
    assert error.value.remedy == "did you mean 'up.weight'?"


def test_unknown_objective_and_hardware() -> None:
    wrong(OptionError, "unknown objective 'tme'; did you mean 'time'", "time, communication", objective="tme")
    with pytest.raises(OptionError, match="unknown hardware 'h10'; did you mean 'h100'") as caught:
        fxshard.Mesh({"a": 2}, "h10")
    assert caught.value.where and caught.value.remedy
