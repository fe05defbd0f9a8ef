"""Rows that travel to experts sharded over several axes, axis by axis: equal to one device, forward and backward, on simulated ranks."""

from __future__ import annotations

import pytest
from equality import mesh_of
from expert_rows import ROWS, check, least_sent, prepared

from fxshard.passes.pipeline import Request, plan_graph
from fxshard.plans.plan_data import EXPERT_IMBALANCE


@pytest.mark.parametrize(
    "mesh, experts, tokens",
    [
        ("dp=2,ep=2", 4, 8),
        ("dp=2,ep=2", 5, 7),  # ranks of the last dp have 2 experts, and 1 and 1 each; tokens 2, 2, 2, 1
        ("ep=2,dp=3", 3, 2),  # ranks without experts, and without tokens
        ("a=2,b=2,c=2", 9, 17),
    ],
)
def test_rows_travel_on_all_axes(mesh: str, experts: int, tokens: int) -> None:
    axes = mesh.count("=")
    rows, shards = "P(experts)" * axes, "S(0)" * axes
    request = Request(pins={"up": shards, "down": shards, "to_experts*": (rows, rows)})
    plan = plan_graph(prepared(experts, tokens)[1], mesh_of(mesh), request)
    check(plan, experts, tokens)
    sent = [(c.kind, c.axis) for c in plan.collectives if c.kind in ("dispatch", "combine")]
    names = [one.partition("=")[0] for one in mesh.split(",")]
    forward = [("dispatch", axis) for axis in names[::-1]] + [("combine", axis) for axis in names]
    assert sent[: 2 * axes] == forward and len(sent) == 4 * axes


def test_a_third_axis_shards_tokens_or_columns() -> None:
    shards = {"up": "RS(0)S(0)", "down": "RS(0)S(0)"}
    rows = "S(0)P(experts)P(experts)"
    plan = plan_graph(prepared(5, 9)[1], mesh_of("t=2,dp=2,ep=2"), Request(pins={**shards, "to_experts*": (rows, rows)}))
    check(plan, 5, 9)


def test_bytes_are_those_of_the_rows_expected_on_each_axis() -> None:
    """Whatever the room in a buffer on the way: each rank's rows, half of which leave on each axis of two."""
    request = Request(pins={"up": "S(0)S(0)", "down": "S(0)S(0)", "to_experts*": ("P(experts)P(experts)",) * 2}, objective="communication")
    plan = plan_graph(prepared(4, 64)[1], mesh_of("dp=2,ep=2"), request)
    check(plan, 4, 64)
    sent = {(c.kind, c.axis, c.bytes) for c in plan.collectives if c.kind in ("dispatch", "combine")}
    each = int(EXPERT_IMBALANCE * 2 * ROWS / 4 / 2)
    assert sent == {(kind, axis, each) for kind in ("dispatch", "combine") for axis in ("dp", "ep")}


def test_the_solver_chooses_two_axes_where_that_sends_less() -> None:
    """With one choice for each token, a journey moves 1.25 (1/2 + 1/2) of a rank's quarter, where a gather moves three quarters."""
    plan, _ = least_sent("dp=2,ep=2", 1, "S(0)S(0)", "S(0)S(0)")
    assert {c.axis for c in plan.collectives if c.kind in ("dispatch", "combine")} == {"dp", "ep"}
