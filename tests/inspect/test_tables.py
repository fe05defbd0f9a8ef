"""Tables and summaries of plans and programs, as golden texts."""

from __future__ import annotations

import dataclasses

from expecttest import assert_expected_inline

from fxshard import inspect
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import MESH, small_plan
from tests.programs import small_program


def test_summary_of_a_plan() -> None:
    assert_expected_inline(
        inspect.summary(small_plan()),
        """\
mesh       dp=2,tp=2, 4 devices (h100)
graph      forward, 4 nodes, hash abababababab
objective  10.75 us, proven optimal (gap 0), of all plans within the limit
memory     64 bytes of 1.07 GB a device at its peak: parameter 64 bytes

collective    axis      count     bytes
------------  ------  -------  --------
all_reduce    tp            1  48 bytes

parameter      count  layout    shape    dtype
-----------  -------  --------  -------  -------
lin.weight         1  RS(0)     8x4      float32

replicated for want of a rule    reason
-------------------------------  --------------
mm                               no rule for it""",
    )


def test_summary_of_a_program() -> None:
    assert_expected_inline(
        inspect.summary(small_program(5)),
        """\
mesh          dp=2,tp=2, 4 devices (h100)
graph         forward, 4 nodes, hash abababababab
objective     10.75 us, proven optimal (gap 0), of all plans within the limit
memory        64 bytes of 1.07 GB a device at its peak: parameter 64 bytes
local graphs  2, one per size class

collective    axis      count     bytes
------------  ------  -------  --------
all_reduce    tp            1  48 bytes

parameter      count  layout    shape    dtype
-----------  -------  --------  -------  -------
lin.weight         1  RS(0)     8x4      float32

kind    name        layout    shape
------  ----------  --------  -------
input   args[0]     S(0)S(1)  5x8
output  outputs[0]  S(0)R     5x4

replicated for want of a rule    reason
-------------------------------  --------------
mm                               no rule for it""",
    )


def test_collectives_of_an_input_have_the_users_name() -> None:
    plan = small_plan()
    moved = dataclasses.replace(plan, redistributions=(dataclasses.replace(plan.redistributions[0], value="w"),))
    assert inspect.collectives_table(moved).endswith("lin.weight -> output")


def test_nodes() -> None:
    assert_expected_inline(
        inspect.nodes_table(small_plan()),
        """\
node    operator         reads            gives     shape      us
------  ---------------  ---------------  --------  -------  ----
w       placeholder                       RS(0)     8x4      0
x       placeholder                       S(0)S(1)  6x8      0
mm      aten.mm.default  S(0)S(1), RS(0)  S(0)P     6x4      3.25
output  output           S(0)R                               0""",
    )
    assert inspect.nodes_table(small_program(6)) == inspect.nodes_table(small_plan())


def test_collectives_decided_and_run() -> None:
    assert_expected_inline(
        inspect.collectives_table(small_plan()),
        """\
no.    collective    axis       bytes  buffer    layouts         edge
-----  ------------  ------  --------  --------  --------------  ------------
0      all_reduce    tp      48 bytes  3x4       S(0)P -> S(0)R  mm -> output""",
    )
    assert_expected_inline(
        inspect.collectives_table(small_program()),
        """\
collective    axis       bytes  buffer    dtype          node                for
------------  ------  --------  --------  -------------  ------------------  ------------
all_reduce    tp      48 bytes  3x4       torch.float32  all_reduce_default  mm -> output""",
    )


def test_a_plan_without_collectives_says_so() -> None:
    plan = dataclasses.replace(small_plan(), redistributions=())
    assert inspect.collectives_table(plan) == "no collectives"
    assert "no collectives" in inspect.summary(plan)


def test_a_partial_plan_has_no_objective() -> None:
    plan = ShardingPlan(MESH, True, "", (), partial=True)
    assert "a partial plan is a set of pins" in inspect.summary(plan)
    assert "gap" not in inspect.summary(plan)


def test_a_cut_search_says_so() -> None:
    plan = small_plan()
    cut = dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, cut=True))
    said = "cut short by its time or work limit"
    assert said in inspect.summary(cut) and said not in inspect.summary(plan)
    assert said in str(cut).splitlines()[1] and said not in str(plan)
