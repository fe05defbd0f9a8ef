"""Schedules: the time of a step, the part of it that is idle, and how many microbatches a stage holds at once.

A step of m microbatches over stages that take t_1, ..., t_p for the forward and backward of one takes

    sum(t) + (m - 1) max(t)

under GPipe and 1F1B: the first microbatch passes all stages, then the slowest stage sets the pace (Zheng et al., Alpa, 2022, section 5.2).
For equal stages this is (m + p - 1) t, exactly. If forward and backward times have the same ratio in all stages, no step takes longer.

Under interleaved 1F1B (Narayanan et al., Megatron-LM, 2021, section 2.2) rank r of p has v stages: r, p + r, and so on. The time is then
estimated as

    sum(t) / v + (v m - 1) max(t)

which is (v m + p - 1) t for equal stages, exactly, if m is a multiple of p.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")


def stages_of_rank(schedule: str) -> int:
    """How many stages a rank has."""
    return 2 if schedule == "Interleaved1F1B" else 1


def microbatches_fit(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether torch's schedule takes so many microbatches: an interleaved one passes them in rounds of equal size, at least ``ranks``."""
    return stages_of_rank(schedule) == 1 or microbatches % max(1, microbatches // ranks) == 0


def step_time(times: Sequence[float], microbatches: int, several: int = 1) -> float:
    """Time of a step; ``times``: of each stage, for the forward and backward of one microbatch. ``several``: how many stages a rank has."""
    return sum(times) / several + (several * microbatches - 1) * max(times)


def bubble(times: Sequence[float], microbatches: int, several: int = 1) -> float:
    """The idle part of a step, averaged over ranks, 0 to 1: (p - 1) / (v m + p - 1) for equal stages."""
    whole = len(times) / several * step_time(times, microbatches, several)
    return 1 - microbatches * sum(times) / whole if whole else 0.0


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose saved values a stage holds at once."""
    if stages_of_rank(schedule) > 1:
        return _interleaved(stage, stages, microbatches, stages_of_rank(schedule))
    return microbatches if schedule == "GPipe" else min(stages - stage, microbatches)


def _interleaved(stage: int, stages: int, microbatches: int, several: int) -> int:
    """Counted along the order in which torch runs the forwards and backwards of the rank that has the stage."""
    ranks = stages // several
    own, rank, total = stage // ranks, stage % ranks, several * microbatches
    turn = microbatches // max(1, microbatches // ranks)
    ahead = min(total, (several - 1) * turn + 2 * (ranks - 1 - rank))
    forwards = [k // turn % several for k in range(total)]
    held = most = forwards[:ahead].count(own)
    for k in range(total):
        held += ahead + k < total and forwards[ahead + k] == own
        most = max(most, held)
        held -= several - 1 - forwards[k] == own
    return most
