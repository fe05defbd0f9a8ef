"""Axes of collectives that threads begin in another order than that of issue."""

from __future__ import annotations

from typing import Any

import pytest

from fxshard.views.measured.span_axes import ANY_AXIS, Issued, span_axes

NAMES = {"all_gather": "all_gather_into_tensor", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter_tensor", "shift": "shift"}


def issued(*program: tuple[str, str], ends: dict[str, list[float]] | None = None) -> Issued:
    """The collectives of ``program``, issued at 0, 1, 2, ... microseconds."""
    events = [{"name": f"_c10d_functional::{NAMES[kind]}", "ts": float(k), "tid": 1} for k, (_, kind) in enumerate(program)]
    return Issued(events, program, ends or {})


def spans(*begun: tuple[str, float, int]) -> list[dict[str, Any]]:
    return [{"name": f"gloo:{name}", "ts": ts, "tid": thread} for name, ts, thread in begun]


GATHERS = ("dp", "all_gather"), ("dp", "all_gather"), ("tp", "all_reduce")


@pytest.mark.parametrize("second", [8, 9])
def test_a_gather_that_begins_last(second: int) -> None:
    """Issued second; the group's first thread works, or another of its threads takes it."""
    found = span_axes(spans(("all_gather", 3.0, 8), ("all_reduce", 4.0, 7), ("all_gather", 40.0, second)), issued(*GATHERS))
    assert found == ["dp", "tp", "dp"]


def test_one_kind_on_two_axes_by_count_and_time() -> None:
    program = ("dp", "all_reduce"), ("tp", "reduce_scatter"), ("tp", "all_reduce")
    assert span_axes(spans(("all_reduce", 3.0, 7), ("all_reduce", 4.0, 7), ("all_reduce", 5.0, 8)), issued(*program)) == ["tp", "tp", "dp"]
    early = spans(("all_reduce", 0.5, 8), ("all_reduce", 3.0, 7))
    assert span_axes(early, issued(*program[:2])) == ["dp", "tp"], "tp's is issued later"


def test_ends_of_waits_decide() -> None:
    program, late = (("dp", "all_reduce"), ("tp", "shift"), ("tp", "all_reduce"), ("dp", "shift")), 50.0
    begun = spans(("all_reduce", 4.0, 7), ("all_to_all", 5.0, 7), ("all_reduce", 9.0, 8), ("all_to_all", late, 8))
    assert span_axes(begun, issued(*program)) == [ANY_AXIS] * 4
    assert span_axes(begun, issued(*program, ends={"tp": [6.0, 7.0, 8.0], "dp": [60.0]})) == [ANY_AXIS] * 4, "not as many waits"
    assert span_axes(begun, issued(*program, ends={"tp": [12.0, 13.0], "dp": [60.0, 61.0]})) == ["tp", "tp", "dp", "dp"]


def test_other_collectives_than_the_programs() -> None:
    begun = spans(("all_gather", 3.0, 8), ("all_gather", 4.0, 8), ("all_gather", 5.0, 7))
    assert span_axes(begun, issued(*GATHERS)) == [ANY_AXIS] * 3
    other = Issued(issued(*GATHERS).events, (*GATHERS[1:], GATHERS[0]), {})
    assert span_axes(spans(("all_gather", 3.0, 8), ("all_gather", 4.0, 8), ("all_reduce", 5.0, 7)), other) == [ANY_AXIS] * 3


def test_spans_that_begin_when_issued_go_by_place() -> None:
    begun = [{**one, "tid": 1} for one in spans(("all_gather", 0.1, 0), ("all_gather", 1.1, 0), ("all_reduce", 2.1, 0))]
    assert span_axes(begun, issued(*GATHERS)) == ["dp", "dp", "tp"]
    assert span_axes(begun[::-1], issued(*GATHERS)) == [ANY_AXIS] * 3
