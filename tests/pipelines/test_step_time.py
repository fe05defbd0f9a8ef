"""The time of a step against the events of a schedule, run one after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.pipelines.schedule import bubble, in_flight, step_time

Event = tuple[str, int, int]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Event]:
    """The order of a stage: forwards until as many are in flight as stages follow, then backward and forward in turn."""
    ahead = min(stages - stage, microbatches)
    order = [("F", k, stage) for k in range(ahead)]
    for k in range(microbatches):
        order.append(("B", k, stage))
        order += [("F", k + ahead, stage)] if k + ahead < microbatches else []
    return order


def gpipe(stage: int, stages: int, microbatches: int) -> list[Event]:
    return [(kind, k, stage) for kind in "FB" for k in range(microbatches)]


ORDERS = {"1F1B": one_f_one_b, "GPipe": gpipe}


def needed(event: Event, stages: int) -> Event | None:
    kind, k, stage = event
    if kind == "F":
        return ("F", k, stage - 1) if stage else None
    return ("B", k, stage + 1) if stage < stages - 1 else ("F", k, stage)


def simulated(schedule: str, forward: list[int], backward: list[int], microbatches: int) -> tuple[int, list[int]]:
    """(the time at which the last event ends, for each stage the most microbatches between forward and backward)."""
    stages = len(forward)
    waiting = [ORDERS[schedule](i, stages, microbatches) for i in range(stages)]
    ends: dict[Event, int] = {}
    free, held, most = [0] * stages, [0] * stages, [0] * stages
    while any(waiting):
        ready = next(i for i in range(stages) if waiting[i] and needed(waiting[i][0], stages) in (None, *ends))
        event = waiting[ready].pop(0)
        before = needed(event, stages)
        start = max(free[ready], ends[before] if before else 0)
        free[ready] = ends[event] = start + (forward if event[0] == "F" else backward)[ready]
        held[ready] += 1 if event[0] == "F" else -1
        most[ready] = max(most[ready], held[ready])
    return max(free), most


@pytest.mark.parametrize("schedule", ORDERS)
@given(stages=st.integers(1, 5), extra=st.integers(0, 6), forward=st.integers(1, 9), backward=st.integers(1, 9))
def test_a_step_of_equal_stages_takes_what_the_formula_says(schedule: str, stages: int, extra: int, forward: int, backward: int) -> None:
    microbatches = stages + extra
    took, held = simulated(schedule, [forward] * stages, [backward] * stages, microbatches)
    times = [float(forward + backward)] * stages
    assert took == step_time(times, microbatches) == (microbatches + stages - 1) * times[0]
    assert bubble(times, microbatches) == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert held == [in_flight(schedule, i, stages, microbatches) for i in range(stages)]


@pytest.mark.parametrize("schedule", ORDERS)
@given(forward=st.lists(st.integers(1, 9), min_size=1, max_size=5), ratio=st.integers(1, 3), extra=st.integers(0, 6))
def test_no_step_takes_longer_if_backward_and_forward_have_one_ratio(schedule: str, forward: list[int], ratio: int, extra: int) -> None:
    microbatches = len(forward) + extra
    took, _ = simulated(schedule, forward, [ratio * f for f in forward], microbatches)
    times = [float(f + ratio * f) for f in forward]
    assert microbatches * max(times) <= took <= step_time(times, microbatches)
