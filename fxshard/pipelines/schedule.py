"""Schedules: the time of a step, the part of it that is idle, and how many microbatches a stage holds at once.

A step of m microbatches over stages that take t_1, ..., t_p for the forward and backward of one takes

    sum(t) + (m - 1) max(t)

under GPipe and 1F1B: the first microbatch passes all stages, then the slowest stage sets the pace (Zheng et al., Alpa, 2022, section 5.2).
For equal stages this is (m + p - 1) t, exactly. If forward and backward times have the same ratio in all stages, no step takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("1F1B", "GPipe")


def step_time(times: Sequence[float], microbatches: int) -> float:
    """Time of a step; ``times``: of each stage, for the forward and backward of one microbatch."""
    return sum(times) + (microbatches - 1) * max(times)


def bubble(times: Sequence[float], microbatches: int) -> float:
    """The idle part of a step, averaged over stages, 0 to 1: (p - 1) / (m + p - 1) for equal stages."""
    whole = len(times) * step_time(times, microbatches)
    return 1 - microbatches * sum(times) / whole if whole else 0.0


def in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose saved values a stage holds at once."""
    return microbatches if schedule == "GPipe" else min(stages - stage, microbatches)
