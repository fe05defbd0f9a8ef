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
model      32 parameters in 1 tensor, forward, 4 nodes
mesh       dp=2,tp=2, 4 devices (h100)
objective  10.75 us, proven optimal (gap 0), of all plans within the limit
step       compute 3.25 us; exposed communication 7.5 us (69.8%): 7.5 us on tp
memory     64 bytes of 1.07 GB a device at its peak: parameter 64 bytes

parameters           count  layout                      bytes
-----------------  -------  ----------------------  ---------
lin                      1  S(0) on tp              128 bytes
input args[0]               S(0) on dp, S(1) on tp
output outputs[0]           S(0) on dp

1 collective, 48 bytes sent by each rank
  together  collective            each  where
----------  ----------------  --------  ----------
    7.5 us  all_reduce on tp  48 bytes  outputs[0]
          partial sum: the dim summed over is sharded

replicated for want of a rule    reason
-------------------------------  --------------
mm                               no rule for it""",
    )


def test_summary_of_a_program() -> None:
    assert_expected_inline(
        inspect.summary(small_program(5)),
        """\
model         32 parameters in 1 tensor, forward, 4 nodes
mesh          dp=2,tp=2, 4 devices (h100)
objective     10.75 us, proven optimal (gap 0), of all plans within the limit
step          compute 3.25 us; exposed communication 7.5 us (69.8%): 7.5 us on tp
memory        64 bytes of 1.07 GB a device at its peak: parameter 64 bytes
local graphs  2, one per size class

parameters           count  layout                      bytes
-----------------  -------  ----------------------  ---------
lin                      1  S(0) on tp              128 bytes
input args[0]               S(0) on dp, S(1) on tp
output outputs[0]           S(0) on dp

1 collective, 48 bytes sent by each rank
  together  collective            each  where
----------  ----------------  --------  ----------
    7.5 us  all_reduce on tp  48 bytes  outputs[0]
          partial sum: the dim summed over is sharded

kind    name        layout                  shape
------  ----------  ----------------------  -------
input   args[0]     S(0) on dp, S(1) on tp  5x8
output  outputs[0]  S(0) on dp              5x4

replicated for want of a rule    reason
-------------------------------  --------------
mm                               no rule for it""",
    )


def test_collectives_of_an_input_have_the_users_name() -> None:
    plan = small_plan()
    moved = dataclasses.replace(plan, redistributions=(dataclasses.replace(plan.redistributions[0], value="w"),))
    assert "S(0)P -> S(0)R  lin " in inspect.collectives_table(moved)


def test_nodes() -> None:
    assert_expected_inline(
        inspect.nodes_table(small_plan()),
        """\
node    operator              reads            gives     shape      us
------  --------------------  ---------------  --------  -------  ----
w       parameter lin.weight                   RS(0)     8x4      0
x       input args[0]                          S(0)S(1)  6x8      0
mm      aten.mm.default       S(0)S(1), RS(0)  S(0)P     6x4      3.25
output  output                S(0)R                               0""",
    )
    assert inspect.nodes_table(small_program(6)) == inspect.nodes_table(small_plan())


def test_collectives_decided_and_run() -> None:
    assert_expected_inline(
        inspect.collectives_table(small_plan()),
        """\
no.    collective    axis       bytes    time  layouts         where       reason
-----  ------------  ------  --------  ------  --------------  ----------  -------------------------------------------
0      all_reduce    tp      48 bytes  7.5 us  S(0)P -> S(0)R  outputs[0]  partial sum: the dim summed over is sharded""",
    )
    assert_expected_inline(
        inspect.collectives_table(small_program()),
        """\
collective    axis       bytes  buffer    dtype    node                where       reason
------------  ------  --------  --------  -------  ------------------  ----------  -------------------------------------------
all_reduce    tp      48 bytes  3x4       float32  all_reduce_default  outputs[0]  partial sum: the dim summed over is sharded""",
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
    assert said in str(cut).splitlines()[2] and said not in str(plan)
