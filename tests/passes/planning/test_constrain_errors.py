"""Invalid constraints: each error names the fault, the place and the remedy."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from passes.constrained import MESH, PAIR, L, getitems, graph, planned
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import fxshard
from fxshard import Equal
from fxshard.errors import ConstraintError, FxshardError, LayoutError, OptionError, PlanError
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.planning import choose
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec, PlannedNode
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.solver import Budget, NoPlanError


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
    short = r"R of 'up.weight' \(up_weight\) has 1 placement, the mesh has 2 axes \(dp=2,tp=2\)"
    wrong(LayoutError, short, "one placement per mesh axis", pins={"up.weight": "R"})
    wrong(LayoutError, r"cannot read layout", r"write 'RS\(0\)'", pins={"up.weight": 3})
    wrong(LayoutError, r"cannot read layout 'RX' at position 1", "one of R", pins={"up.weight": "RX"})
    wrong(LayoutError, r"unknown reduction 'mean'", "sum", pins={"silu": "RP(mean)"})


def test_equal_of_tensors_with_different_numbers_of_dims() -> None:
    """Given by single names and by a glob. The error has the user's names."""
    two = r"^outputs\[1\] \(3 dims\) and up.weight \(2 dims\) cannot have one layout"
    found = wrong(ConstraintError, two, "one Equal for each number of dims", constraints=[Equal("up.weight", "outputs[1]")])
    assert found.where == "Equal('up.weight', 'outputs[1]')"
    several = r"^embed.weight, up.weight and 1 more \(2 dims\) and up.bias \(1 dim\) cannot"
    wrong(ConstraintError, several, "one Equal for each number of dims", constraints=[Equal("*.weight", "up.bias")])


def test_pins_on_nodes_with_several_results() -> None:
    """One layout does not say what the other results have. The remedy shows what to write."""
    name = str(graph().by_name[getitems()[0]].args[0])
    remedy = rf"pins=\{{'{name}': \('RR', None\)\}}"
    wrong(LayoutError, f"{name} has 2 results, .* gives 1 layout", remedy, pins={name: "RR"})
    wrong(LayoutError, f"{name} has 2 results, .* gives 1 layout", remedy, pins={name: (Shard(0), None)})
    wrong(LayoutError, f"{name} has 2 results, .* gives 3 layout", remedy, pins={name: ("RR", None, None)})
    wrong(LayoutError, f"dim 4 .* result 1 of {name}", "0 to 2", pins={name: (None, "S(4)R")})
    wrong(ConstraintError, rf"pins\['{name}'\]\[1\]='P\(max\)R' cannot hold", "it can give", pins={name: (None, "P(max)R")})


def test_a_pin_on_a_result_that_is_not_a_tensor() -> None:
    traced = trace(nn.Conv1d(4, 6, 3), (torch.ones(2, 4, 8),))
    with pytest.raises(LayoutError, match=r"result 0 of convolution_backward is not a tensor(.|\n)*give None in place of 'R'"):
        plan_graph(traced, PAIR, Request(pins={"convolution_backward": ("R", None, None)}))


def test_a_bad_placement_in_a_layout_by_axis_is_named() -> None:
    by_axis: dict[str, Any] = {"dp": Replicate(), "tp": 5}
    remedy = r"write \{'tp': Shard\(0\)\}"
    wrong(LayoutError, r"5 on axis 'tp' of input args\[0\] is not a placement", remedy, input_layouts=by_axis)
    wrong(LayoutError, r"'S\(0\)' on axis 'tp' of output outputs\[0\] is not a placement", remedy, output_layouts={"tp": "S(0)"})
    wrong(LayoutError, r"5 on axis 'tp' of 'up.weight' .* is not a placement", remedy, pins={"up.weight": by_axis})
    wrong(ConstraintError, "input_layouts names 'tp', which does not exist", "name one of", input_layouts={"args[0]": "RR", "tp": 5})
    assert planned(input_layouts={"dp": None, "tp": None}).hash == planned().hash


def test_an_unknown_name_is_answered_with_the_closest_one() -> None:
    some = r"^name one of embed.weight, up.weight, up.bias, down.weight, down.bias and \d+ more$"
    wrong(ConstraintError, "pin 'up.wieght' matches no.*did you mean 'up.weight'", some, pins={"up.wieght": "RR"})
    wrong(ConstraintError, r"pin 'layers\.\*' matches no", some, pins={"layers.*": "RR"})
    wrong(
        ConstraintError, r"input_layouts names 'args\[2\]'.*does not exist", r"one of args\[0\], args\[1\]", input_layouts={"args[2]": "RR"}
    )
    wrong(ConstraintError, "output_layouts names 'output'", r"one of outputs\[", output_layouts={"output": "RR"})
    wrong(ConstraintError, "input_layouts has 3 layouts for 2 tensors", r"args\[0\], args\[1\]", input_layouts=["RR", None, None])


def test_impossible_layouts() -> None:
    error = wrong(ConstraintError, r"pins\['embed.weight'\]='RP' cannot hold", r"can give .*S\(0\)", pins={"embed.weight": "RP"})
    assert "embed.weight" in error.where
    wrong(ConstraintError, r"output_layouts\[outputs\[0\]\]='RP' cannot hold", "not partial", output_layouts={"outputs[0]": "RP"})
    assert "constrained.py" in wrong(ConstraintError, r"pins\['silu'\]='RP'", "can give", pins={"silu": "RP"}).where


def minimal_conflict(**request: Any) -> set[str]:
    error = wrong(ConstraintError, "cannot hold together: ", "remove or change one", **request)
    return set(error.what.split("together: ")[1].split("; "))


def test_contradictions_name_a_minimal_set_of_the_users_constraints() -> None:
    """Constraints that are no part of it are not named."""
    beside = {"down.*": "RR", "silu": "S(0)R"}
    twice = {"up.weight": "S(0)R", "up.*ght": "S(1)R"}
    assert minimal_conflict(pins=twice | beside) == {"pins['up.weight']='S(0)R'", "pins['up.*ght']='S(1)R'"}
    tied = {"head.weight": "RS(0)", "embed.weight": "RS(1)"}
    assert minimal_conflict(pins=tied | beside) == {"pins['head.weight']='RS(0)'", "pins['embed.weight']='RS(1)'"}
    named = {"pins['args[0]']='RR'", "input_layouts[args[0]]='S(0)R'"}
    assert minimal_conflict(pins={"args[0]": "RR", **beside}, input_layouts=["S(0)R", None], output_layouts="RR") == named
    both = "pins['*up.bias']={dp: S(0)}", "pins['up.b*']={dp: R}"
    assert minimal_conflict(pins={"*up.bias": {"dp": Shard(0)}, "up.b*": {"dp": Replicate()}, "down.bias": "RR"}) == set(both)


def test_contradictions_across_nodes() -> None:
    """A tangent has the layout of its output, so a pin on the one can contradict a layout of the other."""
    tangent = graph().inputs_of("tangent")[0].node
    pins = {tangent: "S(0)R", "up.weight": "S(0)R"}
    assert minimal_conflict(pins=pins, output_layouts=["RR", None]) == {f"pins['{tangent}']='S(0)R'", "output_layouts[outputs[0]]='RR'"}


def test_the_search_for_a_minimal_set_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt gets the time that is left. When none is left, the set is not minimal, but it is still a contradiction."""
    given: list[float] = []
    real, named, clock = choose.solve_within, choose.minimal_conflict, itertools.count()

    def watched(problem: Any, budget: Budget) -> Any:
        given.append(budget.time_limit or 0.0)
        return real(problem, Budget(work_limit=budget.work_left))

    def in_clock(*asked: Any) -> Any:
        assert 50 < asked[-1] <= 65
        return named(*asked[:-1], 2.5)

    monkeypatch.setattr(choose, "solve_within", watched)
    monkeypatch.setattr(choose, "minimal_conflict", in_clock)
    monkeypatch.setattr(choose, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    tangent = graph().inputs_of("tangent")[0].node
    said = minimal_conflict(pins={tangent: "S(0)R", "up.weight": "S(0)R", "silu": "S(0)R"}, output_layouts=["RR", None], time_limit=60)
    assert said > {f"pins['{tangent}']='S(0)R'", "output_layouts[outputs[0]]='RR'"}
    assert given == [1.5, 0.5]


def test_contradictions_with_a_plan_name_its_node() -> None:
    free = planned(PAIR)
    nodes = tuple(dataclasses.replace(n, spec=OpSpec((), (L("R"),))) for n in free.nodes if n.name == "args_1")
    partial = ShardingPlan(PAIR, True, "", nodes, partial=True)
    said = minimal_conflict(mesh=PAIR, pins=partial, input_layouts=[None, "S(0)"])
    assert said == {"args_1:  -> R of the plan given as pins", "input_layouts[args[1]]='S(0)'"}
    said = minimal_conflict(mesh=PAIR, pins=planned(PAIR, output_layouts="R"), output_layouts=[None, "S(0)"])
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


def test_invalid_nodes_and_specs_of_a_partial_plan() -> None:
    def partial(name: str, inputs: tuple[str, ...], *outputs: str) -> ShardingPlan:
        spec = OpSpec(tuple(map(L, inputs)), tuple(map(L, outputs)))
        return ShardingPlan(PAIR, True, "", (PlannedNode(name, "", spec, (), ()),), partial=True)

    wrong(
        ConstraintError,
        "names node 'up_wieght'.*did you mean 'up_weight'",
        "name one of embed_weight, ",
        PAIR,
        pins=partial("up_wieght", (), "R"),
    )
    wrong(ConstraintError, f"names '{getitems()[0]}', one output", "name split", PAIR, pins=partial(getitems()[0], (), "R"))
    wrong(LayoutError, r"dim 5 in S\(5\)", "0 to 1", PAIR, pins=partial("up_weight", (), "S(5)"))
    illegal = r"gives silu \(aten.silu.default\) the spec P -> P, which is not legal"
    error = wrong(ConstraintError, illegal, "legal ones are R -> R", PAIR, pins=partial("silu", ("P",), "P"))
    assert "constrained.py" in str(error.where)
    long = partial("silu", ("R", "R"), "R")
    wrong(ConstraintError, "silu the spec .*, but it has 1 operand and 1 output", "layout for each", PAIR, pins=long)
    pending = partial("output", ("P", *"RRRRRR"))
    wrong(ConstraintError, r"output outputs\[0\]: P of the plan.* cannot hold", "not partial", PAIR, pins=pending)
    apart = partial("output", ("R", "R", "S(0)", *"RRRR"))
    mixed = dataclasses.replace(apart, nodes=(*apart.nodes, *partial("embed_weight", (), "R").nodes))
    wrong(ConstraintError, r"gradient embed.weight: S\(0\) of the plan.*; embed_weight:  -> R of the plan", "remove", PAIR, pins=mixed)


def test_memory_limits() -> None:
    """If nothing fits, the error names the least memory found and the largest tensors. Otherwise the plan is within the limit."""
    nothing, least, serving = "nothing fits in memory_limit=100 bytes", r"least found is \d.* no plan takes less", {"train": False}
    wrong(ConstraintError, nothing, least, PAIR, memory_limit=100, **serving)
    whole = {"*.weight": "RR", "*.bias": "RR"}  # without pins, the least memory takes too long to find on two axes
    error = wrong(ConstraintError, nothing, least, memory_limit=100, pins=whole, **serving)
    head, titles, _, *heaviest = str(error.where).splitlines()
    assert head.startswith("mesh dp=2,tp=2; the plan that needs the least reaches its peak ") and len(heaviest) == 5 and "shard" in titles
    assert max(map(len, heaviest)) <= 114 and "layers" not in head and re.search(r"\w+\.py:\d+", head + "".join(heaviest))
    most = sum(planned(PAIR).memory.values())
    assert planned(PAIR, memory_limit=2 * most).objective == planned(PAIR).objective
    assert sum(planned(PAIR, memory_limit=int(0.97 * most)).memory.values()) <= 0.97 * most
    served = sum(planned(PAIR, **serving).memory.values())
    wrong(ConstraintError, "nothing fits", "least found", PAIR, memory_limit=served // 2, pins={"*": "R"}, **serving)
    wrong(OptionError, "cannot read '2 GBs' as a number of bytes", "80GB", memory_limit="2 GBs")
    wrong(OptionError, "memory_limit=-1", "give bytes", memory_limit=-1)
    wrong(OptionError, "memory_limit=0.5", "give bytes", memory_limit=0.5)
    wrong(OptionError, "memory_limit=inf", "give bytes", memory_limit=float("inf"))
    wrong(OptionError, "memory_limit=nan", "give bytes", memory_limit=float("nan"))


def test_a_search_that_ends_without_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found(*_: object, **__: object) -> None:
        raise NoPlanError("the time limit ended the search", cut=cut)

    monkeypatch.setattr("fxshard.passes.planning.choose.Session", none_found)
    what, cut = "nor a proof that there is none: the time limit ended", False
    assert wrong(ConstraintError, what, "^loosen memory_limit", PAIR, time_limit=60.0).where == f"mesh {PAIR}"
    cut = True
    assert wrong(ConstraintError, what, "more time .time_limit=SECONDS", PAIR, time_limit=60.0).where == "time_limit=60"


def test_limits_that_only_together_find_no_plan_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_found(*_: object, **__: object) -> None:
        raise NoPlanError("the problem is too large to search exactly", (), (None, "Communication('tp', at_most=8)"))

    monkeypatch.setattr("fxshard.passes.planning.choose.LimitedSession", none_found)
    said = r"meets memory_limit=.*2,048 bytes.* and Communication\('tp', at_most=8\), .*each of them can be met alone"
    wrong(ConstraintError, said, "loosen one of them", PAIR, memory_limit=2048)


@pytest.mark.parametrize("limit", [0, -1.0, "1", float("nan")])
def test_invalid_time_limits(limit: Any) -> None:
    wrong(OptionError, "time_limit=", "seconds", time_limit=limit)


@pytest.mark.parametrize("pins", [["up.weight"], "RS(0)", {3: "RR"}])
def test_pins_that_are_not_a_mapping(pins: Any) -> None:
    wrong(OptionError, "cannot read pins=", r"'layers.\*.weight': 'RS\(0\)'", pins=pins)


def test_layout_of_an_unknown_name() -> None:
    with pytest.raises(PlanError, match=r"no input or node 'up\.wieght'; did you mean 'up\.weight'") as error:
        planned(PAIR).layout_of("up.wieght")
    assert error.value.remedy == "fxshard.inspect.nodes_table(plan) lists its nodes"


def test_unknown_objective_and_hardware() -> None:
    wrong(OptionError, "unknown objective 'tme'; did you mean 'time'", "time, communication", objective="tme")
    with pytest.raises(OptionError, match="unknown hardware 'h10'; did you mean 'h100'") as caught:
        fxshard.Mesh({"a": 2}, "h10")
    assert caught.value.where and caught.value.remedy
