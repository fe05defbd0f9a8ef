"""The printed text of a plan: golden texts, and no wider than a terminal."""

from __future__ import annotations

import dataclasses

import pytest
from expecttest import assert_expected_inline

from fxshard import inspect
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import single_step
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import Certificate, OpSpec, PlanEnd, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.views.words import merged_names, merged_names_with_counts, time_text
from tests.plans.small_plans import small_plan

L = Layout.parse


def test_a_small_plan() -> None:
    plan = dataclasses.replace(small_plan(), memory={"parameter": 2**29, "optimizer": 2**30}, memory_limit=2 * 10**9)
    assert_expected_inline(
        str(plan),
        """\
model      32 parameters in 1 tensor, forward, 4 nodes
mesh       dp=2,tp=2, 4 devices (h100)
objective  10.75 us, proven optimal (gap 0), of all plans within the limit
step       compute 3.25 us; exposed communication 7.5 us (69.8%): 7.5 us on tp
operators  1 result: 100% S(0) on dp, P on tp
memory     1.61 GB of 2.00 GB a device at its peak: optimizer 1.07 GB, parameter 537 MB

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


@pytest.mark.parametrize("hardware", ["h100", Hardware("own", {4: 1e12}, 1e12, 1.0, 8, Link(1e9, 1.0), None, memory=80e9)])
def test_a_plan_that_a_device_cannot_hold_says_so(hardware: str | Hardware) -> None:
    mesh = Mesh({"dp": 2, "tp": 2}, hardware)
    fits = dataclasses.replace(small_plan(), mesh=mesh, memory={"parameter": 80 * 10**9})
    beyond = dataclasses.replace(fits, memory={"parameter": 80 * 10**9, "input": 1})
    name = hardware if isinstance(hardware, str) else hardware.name
    assert "does not fit" not in str(fits) and f'does not fit  {name} has 80.0 GB; give a limit, such as memory_limit="72GB"' in str(beyond)
    assert ShardingPlan.from_json(beyond.to_json()).mesh.hardware.memory == 80e9


def test_nothing_is_said_of_a_device_whose_memory_is_unknown() -> None:
    assert "does not fit" not in str(dataclasses.replace(small_plan(), mesh=Mesh({"dp": 2, "tp": 2}), memory={"parameter": 10**15}))


def limited() -> ShardingPlan:
    """A plan from a search that was cut short: two weights gathered twice, two blocks recomputed, long names and specs."""
    gather = single_step(0, L("S(0)")[0], L("R")[0])
    assert gather is not None
    weights = [f"layers.{k}.attention.projection_of_the_queries.weight" for k in (0, 1)]
    nodes = [PlannedNode(w.replace(".", "_"), "placeholder", OpSpec((), (L("S(0)R"),)), ((8, 8),), ("float32",)) for w in weights]
    many = OpSpec((L("RR"),) * 30, (L("RR"),))
    nodes.append(PlannedNode("mm", "a_library_of_mine.an_operator_with_a_name.default", many, ((8, 8),), ("float32",), 1e4))
    moves = [
        Redistribution(n.name, (8, 8), 4, L("S(0)R"), L("RR"), (gather,), (("mm", k),), 1.5e3, 500.0) for n in nodes[:2] for k in range(2)
    ]
    return dataclasses.replace(
        small_plan(),
        nodes=tuple(nodes),
        redistributions=tuple(moves),
        inputs=tuple(PlanEnd("parameter", w, n.name) for w, n in zip(weights, nodes, strict=False)),
        certificate=Certificate("microseconds", 1.6e4, 1.5e4, cut=True),
        recomputed={"layers.0": ("mm",), "layers.1": ("mm",)},
        fallbacks=(),
    )


def test_repeated_gathers_and_recomputed_blocks() -> None:
    text = str(limited())
    assert max(map(len, text.splitlines())) <= 110
    assert_expected_inline(
        "\n".join(text.splitlines()[:10]),
        """\
model           128 parameters in 2 tensors, forward, 3 nodes
mesh            dp=2,tp=2, 4 devices (h100)
not used        tp: no tensor is sharded there, all its ranks do the same work
objective       16 ms, lower bound 15 ms, gap 6.250%, cut short by its time or work limit
step            compute 10 ms; exposed communication 6 ms (37.5%): 6 ms on dp
beside compute  assumes 2 ms of gathers hidden behind compute
operators       1 result: 100% whole
memory          64 bytes of 1.07 GB a device at its peak: parameter 64 bytes
gathered twice  layers.0-1.attention.projection_of_the_queries.weight, again in the backward
computed again  2 blocks: layers.0-1""",
    )
    assert "layers.0.attention.pr...ries.weight" not in text and "30 x RR" in inspect.nodes_table(limited())


def test_names_and_times() -> None:
    names = ["layers.0.w", "layers.1.w", "layers.3.w", "norm", "0", "1", "a.0.b.1", "a.0.b.2"]
    assert merged_names(names) == ["layers.0-1,3.w", "norm", "0-1", "a.0.b.1", "a.0.b.2"]
    assert merged_names_with_counts(names[:4]) == [("layers.0-1,3.w", 3), ("norm", 1)]
    assert [time_text(t) for t in (0.0, 1e-13, 10.75, 999.94, 999.96, 43065.5, -1.5e6)] == [
        *("0 us", "0 us", "10.75 us", "999.9 us", "1 ms", "43.07 ms", "-1.5 s")
    ]
