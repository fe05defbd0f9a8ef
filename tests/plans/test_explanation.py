"""The text of explain, for hand-written plans: where a difference arises, and an answer that costs less than the plan."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline

from fxshard.plans.comparison import Comparison, compare
from fxshard.plans.explanation import Choice, Explanation, Reading
from fxshard.plans.plan_data import Certificate, PlanEnd, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import L, small_plan
from tests.plans.test_comparison import other_plan

FAR = 12


def with_unrelated_nodes(plan: ShardingPlan, cost: float) -> ShardingPlan:
    """The plan with 12 more nodes, unrelated to the others, which cost 1, 2, ... 12 times ``cost``."""
    extra = [PlannedNode(f"far{'x' * k}", "aten.mul.Tensor", plan.nodes[0].spec, ((4,),), ("float32",), cost * (k + 1)) for k in range(FAR)]
    nodes = (*plan.nodes, *extra)
    total = sum(n.compute for n in nodes) + sum(r.cost for r in plan.redistributions)
    return dataclasses.replace(plan, nodes=nodes, certificate=Certificate("microseconds", total, total / 2, True))


def asked(before: ShardingPlan, after: ShardingPlan) -> Explanation:
    readings = (Reading("mm", "aten.mm.default", L("S(0)R"), 2.5, ""),)
    own = Choice("S(0)S(1)", before.objective, before.lower_bound, True, before.certificate.cut, plan=before)
    other = Choice("S(0)R", after.objective, after.lower_bound, cut=after.certificate.cut, plan=after, where=compare(before, after))
    choices = sorted((own, other), key=lambda c: c.total or 0.0)
    return Explanation("args[0]", "x", "input", "", L("S(0)S(1)"), 0.0, before.objective, "microseconds", readings, tuple(choices))


def test_costs_near_the_value_come_first_then_the_sum_of_the_rest() -> None:
    """By hand: +2.5 for the gather of x, +3.25 for the compute of mm, -7.5 for its reduction; -1 to -12 for the others."""
    explained = asked(with_unrelated_nodes(small_plan(), 2.0), with_unrelated_nodes(other_plan(), 1.0))
    (choice,) = [c for c in explained.choices if not c.chosen]
    assert choice.where is not None
    near = {"args[0]", "x", "mm"}
    said = "here -1.75 us, 12 elsewhere -78 us; here: tp +1 all_gather, -1 all_reduce; elsewhere: "
    assert choice.where.brief(near) == f"{said}far{'x' * 11} -12 us, far{'x' * 10} -11 us, far{'x' * 9} -10 us, ..."
    assert sum(choice.where.differences().values()) == pytest.approx(choice.total - explained.total if choice.total else 0.0)
    compute, moves = choice.where.tables(near)[1:3]
    assert [line.split()[0] for line in compute.splitlines()[2:5]] == ["mm", f"far{'x' * 11}", f"far{'x' * 10}"]
    assert compute.endswith("and 3 more") and moves.splitlines()[2].startswith("mm")


def test_a_parameters_gradient_is_near_it() -> None:
    """The gradient of w is reduced, which costs 7.5 that the other plan does not have."""
    plan, other = small_plan(), other_plan()
    gradient = Redistribution("mm", (6, 4), 4, L("S(0)P"), L("S(0)R"), plan.redistributions[0].steps, (("output", 0),), 7.5)
    ends = (PlanEnd("gradient", "lin.weight", "mm"),)
    before = dataclasses.replace(plan, redistributions=(gradient,), outputs=ends)
    after = dataclasses.replace(other, outputs=ends)
    choice = Choice("RR", after.objective, after.lower_bound, plan=after, where=compare(before, after))
    explained = Explanation("lin.weight", "w", "parameter", "", L("RS(0)"), 0.0, before.objective, "microseconds", (), (choice,))
    assert "here -4.25 us, 1 elsewhere +2.5 us" in str(explained)


def test_an_answer_that_costs_less_than_the_plan_is_pointed_out() -> None:
    cheaper = asked(with_unrelated_nodes(small_plan(), 2.0), with_unrelated_nodes(other_plan(), 1.0))
    assert_expected_inline(
        str(cheaper),
        """\
args[0] (input, node x): S(0)S(1), in a plan of 166.8 us

read by    which is         as     redistribution    line
---------  ---------------  -----  ----------------  ------
mm         aten.mm.default  S(0)R  2.5 us

layout    total     difference    gap          where
--------  --------  ------------  -----------  ---------------------------------------------------------------
S(0)R     87 us     -79.75 us     50.000% cut  here -1.75 us, 12 elsewhere -78 us; here: tp +1 all_gather, ...
S(0)S(1)  166.8 us  0             50.000% cut  the plan's own

S(0)R costs less than this plan, whose search was cut by its time or work limit:
a longer time_limit can find a plan of 87 us or less; choices[0].plan of this answer is one.""",
    )
    dearer = asked(with_unrelated_nodes(small_plan(), 1.0), with_unrelated_nodes(other_plan(), 2.0))
    same = asked(with_unrelated_nodes(small_plan(), 1.0), with_unrelated_nodes(small_plan(), 1.0))
    assert "costs less" not in str(dearer) + str(same)
    assert "other layouts that cost the same" in str(same)


def test_without_names_all_is_elsewhere() -> None:
    found: Comparison = compare(small_plan(), other_plan())
    assert found.brief() == "2 elsewhere -1.75 us; elsewhere: mm -4.25 us, args[0] +2.5 us"
