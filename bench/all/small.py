"""Overhead of small calls (``bench.overhead``) and memory predicted over measured (``bench.memory``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from bench.all.figures import COMPUTED, TIMED, Cell, Figure, interval
from bench.fresh_process import in_fresh_process

OVERHEAD, MEMORY = "overhead", "memory"
GOALS = {"local, with collectives": 1.15, "local, without": 1.40, "DTensor, eager": 1.0, "plain, compiled": 1.15}
FAMILIES = ("perceptron", "convolutions", "llama")
WORST = "largest relative error of the predicted peak"


def overhead_cells() -> Iterator[Cell]:
    yield Cell(OVERHEAD, "small calls", overhead)


def memory_cells(quick: bool = False) -> Iterator[Cell]:
    for family in FAMILIES[:1] if quick else FAMILIES:
        yield Cell(MEMORY, family, partial(memory, family))


def overhead() -> Iterator[Figure]:
    from bench.overhead import PAIRS, measured

    times = in_fresh_process(measured)
    for what, mine, other in PAIRS:
        ratios = [a / b for a, b in zip(times[mine], times[other], strict=True)]
        yield Figure(OVERHEAD, "small calls", f"{what}: {mine} over {other}", *interval(ratios), goal=GOALS[other], noise=TIMED)


def peaks(family: str) -> list[tuple[str, str, float]]:
    """(plan, training or inference, predicted over measured peak) of a family on two ranks: the solver's plan and a random one."""
    from bench.memory import rows

    return [(row[1], row[2], float(row[4])) for row in rows(family, "tp=2", 1, False)]


def memory(family: str) -> Iterator[Figure]:
    found = in_fresh_process(peaks, family)
    plan, what, ratio = max(found, key=lambda one: abs(one[2] - 1))
    yield Figure(MEMORY, family, WORST, abs(ratio - 1), goal=0.1, noise=COMPUTED, note=f"{len(found)} peaks; {plan}, {what}")


HEADERS = ("what", "value", "at most", "note", "measured", "load")


def rows(kept: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """Overhead, memory, and the ratio that steps were predicted at."""
    from bench.all.steps import spread

    for one in kept:
        what = one.name if one.part == OVERHEAD else f"{one.cell}: {one.name}"
        yield what, spread(one), f"{one.goal:.2f}" if one.goal else "", one.note, one.when, f"{one.load:.0f}"
