"""The time of a step against the events of a schedule, run one after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.pipelines.schedule import bubble, in_flight, microbatches_fit, step_time

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


def interleaved(rank: int, ranks: int, microbatches: int) -> list[Event]:
    """torch's order, which is Megatron's, for two stages a rank: microbatches pass in rounds of ``ranks``."""
    orders = {kind: [(k // (2 * ranks) * ranks + k % ranks, k // ranks % 2) for k in range(2 * microbatches)] for kind in "FB"}
    forward = [("F", k, rank + half * ranks) for k, half in orders["F"]]
    backward = [("B", k, rank + (1 - half) * ranks) for k, half in orders["B"]]
    ahead = min(len(forward), ranks + 2 * (ranks - 1 - rank))
    order, later = forward[:ahead], forward[ahead:]
    for i, event in enumerate(backward):
        order += [*later[i : i + 1], event]
    return order


@given(ranks=st.integers(1, 4), rounds=st.integers(1, 4), forward=st.integers(1, 9), backward=st.integers(1, 9))
def test_a_step_of_equal_interleaved_stages(ranks: int, rounds: int, forward: int, backward: int) -> None:
    microbatches, stages = ranks * rounds, 2 * ranks
    waiting = [interleaved(i, ranks, microbatches) for i in range(ranks)]
    ends: dict[Event, int] = {}
    free, held, most = [0] * ranks, [0] * stages, [0] * stages
    while any(waiting):
        ready = next(i for i in range(ranks) if waiting[i] and needed(waiting[i][0], stages) in (None, *ends))
        kind, _, stage = event = waiting[ready].pop(0)
        before = needed(event, stages)
        free[ready] = ends[event] = max(free[ready], ends[before] if before else 0) + (forward if kind == "F" else backward)
        held[stage] += 1 if kind == "F" else -1
        most[stage] = max(most[stage], held[stage])
    times = [float(forward + backward)] * stages
    assert max(free) == step_time(times, microbatches, 2) == (2 * microbatches + ranks - 1) * times[0]
    assert bubble(times, microbatches, 2) == pytest.approx((ranks - 1) / (2 * microbatches + ranks - 1))
    assert most == [in_flight("Interleaved1F1B", i, stages, microbatches) for i in range(stages)]
    assert microbatches_fit("Interleaved1F1B", ranks, microbatches) and not microbatches_fit("Interleaved1F1B", 2, 5)
