"""Tables and summaries of plans and programs, as golden texts."""

from __future__ import annotations

import dataclasses
import sys

from expecttest import assert_expected_inline

from fxshard import inspect
from fxshard.layout.redistribution import single_step
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.fields import program_fields
from fxshard.views.issued import issued_table
from fxshard.views.screen import program_parts, screen
from tests.plans.small_plans import MESH, L, small_plan
from tests.programs import small_program


def test_the_screen_of_a_program_adds_its_graphs_and_its_call() -> None:
    """The plan's screen itself is a golden text in tests/plans/test_plan_text.py."""
    plan, program = inspect.summary(small_plan()).splitlines(), inspect.summary(small_program(5)).splitlines()
    assert str(small_plan()) == inspect.summary(small_plan())
    squeezed = [" ".join(line.split()) for line in program]
    assert [line for line in map(" ".join, map(str.split, plan)) if line not in squeezed] == []
    assert_expected_inline(
        "\n".join(line for line, short in zip(program, squeezed, strict=True) if short not in map(" ".join, map(str.split, plan))),
        """\
local graphs  2, one per size class
kind    name        layout                  shape
------  ----------  ----------------------  -------
input   args[0]     S(0) on dp, S(1) on tp  5x8
output  outputs[0]  S(0) on dp              5x4""",
    )


def test_what_belongs_to_the_model_shares_a_line() -> None:
    """Of a training step, hundreds of parameters are written in place."""
    ends = [{"kind": "mutation", "name": f"layers.{k}.w{n}.weight", "layout": "RS(0)", "shape": [4, 4]} for k in range(40) for n in "qk"]
    fields = {"inputs": [], "outputs": ends, "sizes": [], "guards": []}
    (table,) = program_parts(view_of(small_plan()), fields)
    assert table.splitlines()[2].split("  ")[0] == "mutation" and len(table.splitlines()) == 3
    assert "80: layers.0-39.wq.weight, layers.0-39.wk.weight" in table


def test_compiled_code_is_said() -> None:
    fields = {**program_fields(small_program(5)), "compiled": {"models": 1, "devices": ["cpu"]}}
    said = screen(view_of(small_plan()), fields)
    assert "compiled code  for cpu, for 1 of 2 size classes; fxshard run --compiler aot_inductor runs it" in said


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
serves    collective    axis       bytes  buffer    dtype    node                where       reason
--------  ------------  ------  --------  --------  -------  ------------------  ----------  -------------------------------------------
0         all_reduce    tp      48 bytes  3x4       float32  all_reduce_default  outputs[0]  partial sum: the dim summed over is sharded""",
    )


def test_collectives_that_travel_together() -> None:
    """Three of the plan's in one buffer, for two reasons, and one by itself."""
    plan = small_plan()
    (one,) = plan.redistributions
    step = single_step(1, L("S(0)")[0], L("R")[0])
    assert step is not None
    gathered = dataclasses.replace(one, value="w", source=L("RS(0)"), target=L("RR"), steps=(step,))
    view = view_of(dataclasses.replace(plan, redistributions=(one, gathered, gathered, one)))
    row = {"kind": "all_gather", "axis": "tp", "bytes": 96, "shape": [24], "dtype": "torch.float32", "node": "packed"}
    program = {"collectives": [{**row, "serves": [[0, 0], [1, 0], [3, 0]]}, {**row, "serves": [[2, 0]]}]}
    first, second = issued_table(view, program, sys.maxsize).splitlines()[-2:]
    assert first.split()[0] == "0-1,3" and second.split()[0] == "2"
    assert "and 2 more" in first and "2: partial sum" in first and "; 1: the weight is kept as" in first and "; " not in second
    fields = {**program_fields(small_program(5)), **program}
    assert "collectives 2 issued for the plan's 4, some of which travel together" in " ".join(screen(view, fields).split())


def test_an_axis_along_which_nothing_is_sharded_is_named() -> None:
    plan = small_plan()
    nodes = tuple(dataclasses.replace(n, spec=OpSpec(n.spec.inputs, tuple(L("S(0)R") for _ in n.spec.outputs))) for n in plan.nodes)
    idle = dataclasses.replace(plan, nodes=nodes)
    assert "not used   tp: no tensor is sharded there, all its ranks do the same work" in str(idle)
    assert "not used" not in str(plan)


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
