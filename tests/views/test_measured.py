"""A profiler's events beside a predicted timeline: axes by order, waits, other threads, and a trace with both steps at 0."""

from __future__ import annotations

from typing import Any

import pytest

from fxshard.timeline import DEVICE, Timeline
from fxshard.timeline import Event as Predicted
from fxshard.views.measured.span_axes import ANY_AXIS
from fxshard.views.measured.step import STEP, WAIT, both_table, both_traces, measured_step

GATHER, REDUCE = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_reduce"
ISSUES = [("dp", "all_gather"), ("tp", "all_reduce")]
PREDICTED = Timeline((Predicted("mm", "aten.mm", DEVICE, 0.0, 40.0), Predicted("r", "all_reduce", "tp", 40.0, 60.0, 20.0)), 60.0)


def event(name: str, start: float, took: float, thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": 1000.0 + start, "dur": took, "tid": thread, "pid": 99, "cat": "cpu_op"}


EVENTS = [
    event("before", -5.0, 2.0),
    event(STEP, 0.0, 100.0),
    event(GATHER, 5.0, 2.0),
    event("aten::mm", 10.0, 30.0),
    event(WAIT, 42.0, 8.0),
    event(f"{REDUCE}_", 60.0, 3.0),
    event(REDUCE, 61.0, 1.0),  # inside the one before: not another collective
    event(WAIT, 65.0, 25.0),
    event("gloo:all_gather", 6.0, 44.0, 8),
    event("aten::copy_", 20.0, 5.0, 8),
    event("gloo:all_reduce", 62.0, 28.0, 9),
    event("after", 101.0, 1.0),
    {"ph": "X", "name": "PyTorch Profiler (0)", "ts": 1001.0, "dur": 1.0, "tid": "PyTorch Profiler"},
    {"ph": "M", "name": "thread_name", "tid": 7},
]


def test_axes_and_waits() -> None:
    step = measured_step(EVENTS, ISSUES, ["dp", "tp"], (GATHER, REDUCE))
    assert (step.total, step.waited(), step.waited("tp")) == (100.0, 33.0, 25.0)
    assert (step.communicating("dp"), step.communicating("tp")) == (44.0, 28.0)
    assert [[e["name"] for e in events] for events in step.operators.values()][1:] == [["aten::copy_"]]
    assert "before" not in str(step) and "after" not in str(step)


def test_collectives_that_the_program_does_not_list_have_no_axis() -> None:
    step = measured_step(EVENTS, ISSUES[1:], ["tp"], (GATHER, REDUCE))
    assert step.waited(ANY_AXIS) == 33.0 and step.waited("tp") == 0.0
    assert "on an unknown axis" in both_table(PREDICTED, step, ["tp"])


def test_a_trace_without_a_step() -> None:
    with pytest.raises(ValueError, match="no range 'fxshard step'"):
        measured_step(EVENTS[2:], [], [], ())


def test_the_table() -> None:
    step = measured_step(EVENTS, ISSUES, ["dp", "tp"], (GATHER, REDUCE))
    rows = {line[:36].strip(): line[36:].split() for line in both_table(PREDICTED, step, ["dp", "tp"]).splitlines()[2:]}
    assert rows["step"] == ["60", "us", "100", "us", "1.67"]
    assert rows["operators, and all else but waiting"] == ["40", "us", "67", "us", "1.68"]
    assert rows["collectives on tp: waited for"] == ["20", "us", "25", "us", "1.25"]
    assert rows["collectives on dp: under way"] == ["0", "us", "44", "us"]


def test_both_steps_begin_at_0_in_processes_of_their_own() -> None:
    step = measured_step(EVENTS, ISSUES, ["dp", "tp"], (GATHER, REDUCE))
    events = both_traces(PREDICTED, step, ["dp", "tp"], 3)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "predicted step", 1: "measured step of rank 3"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = {(lanes[e["pid"], e["tid"]], e["name"], e["ts"]) for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert {("device", "aten::mm", 10.0), ("axis dp", "gloo:all_gather", 6.0), ("axis tp", "gloo:all_reduce", 62.0)} <= shown
    assert ("thread 1", "aten::copy_", 20.0) in shown and ("device", WAIT, 42.0) in shown
