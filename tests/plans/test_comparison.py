"""fxshard.diff and plan.why_collective, as golden texts."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline

import fxshard
from fxshard.errors import OptionError, PlanError
from fxshard.layout.redistribution import single_step
from fxshard.plans.comparison import signed
from fxshard.plans.plan_data import Certificate, OpSpec, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import L, small_plan


def other_plan() -> ShardingPlan:
    """The same matmul with w whole: x is gathered, and nothing is pending."""
    plan = small_plan()
    step = single_step(1, L("S(1)")[0], L("R")[0])
    assert step is not None
    specs = {"w": OpSpec((), (L("RR"),)), "mm": OpSpec((L("S(0)R"), L("RR")), (L("S(0)R"),))}
    nodes = tuple(dataclasses.replace(n, spec=specs.get(n.name, n.spec), compute=n.compute * 2) for n in plan.nodes)
    move = Redistribution("x", (6, 8), 4, L("S(0)S(1)"), L("S(0)R"), (step,), (("mm", 0),), 2.5)
    certificate = Certificate("microseconds", 9.0, 9.0)
    return dataclasses.replace(
        plan, nodes=nodes, redistributions=(move,), certificate=certificate, memory={"parameter": 128, "gradient": 0}
    )


def test_diff() -> None:
    assert_expected_inline(
        str(fxshard.diff(small_plan(), other_plan())),
        """\
             before    after      difference
-----------  --------  ---------  -------------------
objective    10.75 us  9 us       -1.75 us (-16.3%)
memory       64 bytes  128 bytes  +64 bytes (+100.0%)
- parameter  64 bytes  128 bytes  +64 bytes (+100.0%)

parameter    before    after
-----------  --------  -------
lin.weight   RS(0)     RR

compute of    operator         before    after
------------  ---------------  --------  -------
mm            aten.mm.default  3.25 us   6.5 us

redistribution of    layouts            steps           before    after
-------------------  -----------------  --------------  --------  -------
mm                   S(0)P -> S(0)R     tp: all_reduce  7.5 us    -
args[0]              S(0)S(1) -> S(0)R  tp: all_gather  -         2.5 us

collective    axis    before        after         difference
------------  ------  ------------  ------------  --------------
all_gather    tp      0 (0 bytes)   1 (48 bytes)  +1 (+48 bytes)
all_reduce    tp      1 (48 bytes)  0 (0 bytes)   -1 (-48 bytes)""",
    )


def test_equal_plans() -> None:
    found = fxshard.diff(small_plan(), small_plan())
    assert found.equal and not (found.parameters or found.nodes or found.moves or found.traffic or found.memory)
    assert_expected_inline(str(found), """the plans are equal: dp=2,tp=2 (h100), objective 10.75 us""")


def test_another_graph_is_compared_by_name() -> None:
    plan = small_plan()
    extra = PlannedNode("relu", "aten.relu.default", OpSpec((L("S(0)R"),), (L("S(0)R"),)), ((6, 4),), ("float32",))
    larger = dataclasses.replace(plan, graph_hash="cd" * 32, nodes=(*plan.nodes, extra))
    assert_expected_inline(
        str(fxshard.diff(plan, larger)),
        """\
the plans are for different graphs; nodes with the same name are compared

           before    after     difference
---------  --------  --------  ------------
objective  10.75 us  10.75 us  0

node    operator           before    after
------  -----------------  --------  --------------
relu    aten.relu.default  -         S(0)R -> S(0)R""",
    )


def test_similar_rows_share_a_line() -> None:
    nodes = tuple(PlannedNode(f"mul_{k}", "aten.mul.Tensor", OpSpec((), (L("RR"),)), ((4,),), ("float32",), 1.0) for k in range(3))
    plan = ShardingPlan(small_plan().mesh, True, "", nodes)
    twice = dataclasses.replace(plan, nodes=tuple(dataclasses.replace(n, compute=2.0) for n in nodes))
    assert "mul_0 and 2 like it" in str(fxshard.diff(plan, twice))


def test_recomputed_nodes_share_a_line_and_no_line_is_wide() -> None:
    names = [f"{'a_very_long_name_' * 4}{k}_again" for k in range(3)]
    nodes = tuple(PlannedNode(n, "aten.mul.Tensor", OpSpec((), (L("RR"),)), ((4,),), ("float32",), 2.0) for n in names)
    plan = small_plan()
    twice = dataclasses.replace(
        plan, nodes=(*plan.nodes, *nodes), memory={"parameter": 64, "gathered": 10**9}, recomputed={"layers.0": ("mul",)}
    )
    text = str(fxshard.diff(plan, twice))
    assert "3 nodes, again" in text and "6 us" in text and "a_very_long" not in text and "computed again  nothing   layers.0" in text
    assert "15625001 times" in text and max(map(len, text.splitlines())) <= 110


def test_differences_have_units() -> None:
    assert [signed(v, "microseconds") for v in (0.48, -4484.0, 1e-12)] == ["+0.48 us", "-4.484 ms", "0"]
    assert [signed(v, "bytes") for v in (-16777216, 12, 0)] == ["-16.8 MB", "+12 bytes", "0"]


def test_only_plans_are_compared() -> None:
    with pytest.raises(OptionError, match="plan is a str"):
        fxshard.diff(small_plan(), "plan.json")  # type: ignore[arg-type]


def test_why_a_collective() -> None:
    assert_expected_inline(
        str(small_plan().why_collective(0)),
        """\
collective 0: all_reduce on tp, S(0)P -> S(0)R, 48 bytes sent by each rank
value mm, all_reduce(tp: P->R): 7.5 us together

       layout    node    is                 line
-----  --------  ------  -----------------  ------------------------------
gives  S(0)P     mm      aten.mm.default    model.py:7: return self.lin(x)
reads  S(0)R     output  output outputs[0]

It would not run if mm gave S(0)R.
A sum is pending because the dim that is summed over is sharded.
plan.explain('mm', 'S(0)R') says what that would cost.""",
    )


def test_why_a_collective_on_one_of_several_results() -> None:
    """The value is a getitem, which is no node of the plan: the answer names the operator and the index."""
    plan = other_plan()
    (move,) = plan.redistributions
    moved = dataclasses.replace(plan, redistributions=(dataclasses.replace(move, value="getitem_1"),), picked={"getitem_1": ("mm", 1)})
    found = moved.why_collective(0)
    assert (found.producer.node, found.producer.what, found.producer.line) == ("mm", "aten.mm.default", "model.py:7: return self.lin(x)")
    (reader,) = found.readers
    assert (reader.node, reader.what, reader.layout) == ("mm", "aten.mm.default, operand 0", L("S(0)R"))
    assert "plan.explain('mm[1]', 'S(0)R')" in str(found)


@pytest.mark.parametrize("index", [1, -1, True, "0"])
def test_unknown_collectives_are_refused(index: int) -> None:
    with pytest.raises(PlanError, match="the plan has 1, counted from 0") as error:
        small_plan().why_collective(index)
    assert error.value.remedy == "fxshard.inspect.collectives_table(plan) numbers them"
