"""The least excess over a limit: the value found and the proven bound, against enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings

from fxshard.solver import InfeasibleError, PlacementProblem, solve
from fxshard.solver.limits import least
from fxshard.solver.limits.least import Least, least_excess
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from tests.solver.problems import grid, with_rows

SEEDS = (1, 2, 5)
"""Seeds of grids that need more than one round."""


def all_allowed(problem: PlacementProblem) -> list[tuple[int, ...]]:
    free = replace(problem, usage_limit=None, rows=())
    every = itertools.product(*(range(len(costs)) for costs in problem.node_costs))
    return [choices for choices in every if np.isfinite(free.evaluate(choices))]


def conflicting(seed: int, *, transfers: bool, rows: int = 3, states: int = 3) -> PlacementProblem:
    """A grid with a third of its pairs of neighbouring states forbidden, so that states with little memory conflict."""
    problem = grid(rows, 3, states, seed, memory=True, transfers=transfers)
    rng = np.random.default_rng(seed)
    tables = tuple(np.where(rng.random(table.shape) < 0.35, np.inf, table) for table in problem.edge_costs)
    return replace(problem, edge_costs=tables, usage_limit=1.0)


@settings(max_examples=40, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_the_least_peak(problem: PlacementProblem) -> None:
    memory = replace(problem, rows=())
    assume(memory.usage_limit is not None and memory.all_lives)
    every = all_allowed(memory)
    try:
        known = least_excess(memory, Budget())
    except Exhausted:
        assert not every
        return
    if not every:
        assert known.choices is None
        return
    peak = min(map(memory.peak, every))
    assert known.choices is not None and tuple(known.choices) in every and not known.cut
    assert memory.peak(known.choices) - memory.usage_limit == pytest.approx(known.found, abs=1e-6)
    if peak > memory.usage_limit:
        assert known.found == pytest.approx(peak - memory.usage_limit, abs=1e-6)
        assert known.bound == pytest.approx(known.found, abs=1e-6)
    else:
        assert known.found <= 1e-6
        assert known.bound <= peak - memory.usage_limit + 1e-6


@settings(max_examples=50, deadline=None)
@given(with_rows(hard=True))
def test_the_least_sum_of_a_row(problem: PlacementProblem) -> None:
    """Weights may be negative."""
    alone = replace(problem, usage_limit=None, rows=problem.rows[:1])
    free = replace(alone, rows=(replace(alone.rows[0], limit=0.0, slope=1.0),))
    base = replace(alone, rows=())
    every = all_allowed(alone)
    assume(every)
    shift = 1e3  # so that no sum is below the limit, where a slope costs nothing
    free = replace(free, rows=(replace(free.rows[0], limit=-shift),))
    sums = [free.evaluate(choices) - base.evaluate(choices) - shift for choices in every]
    known = least_excess(alone, Budget())
    excess = min(sums) - alone.rows[0].limit
    assert known.bound <= excess + 1e-6
    assert known.found >= excess - 1e-6
    if excess > 0:
        assert known.found == pytest.approx(excess, abs=1e-4) and known.bound == pytest.approx(excess, abs=1e-4)


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_least_peak_where_states_conflict(transfers: bool, seed: int) -> None:
    problem = conflicting(seed, transfers=transfers)
    peak = min(map(problem.peak, all_allowed(problem)))
    with pytest.raises(InfeasibleError) as error:
        solve(problem)
    assert error.value.least_usage == error.value.usage_bound == peak


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_does_not_depend_on_the_value_found(transfers: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the value found stays that of the first, greedy choices; the bound must still be near the optimum."""
    problem = conflicting(seed, transfers=transfers)
    excess = min(map(problem.peak, all_allowed(problem))) - 1.0
    offer = least._Best.offer
    monkeypatch.setattr(least._Best, "offer", lambda best, choices: offer(best, choices) if best.choices is None else None)
    known = least_excess(problem, Budget())
    assert excess * (1 - 0.01) <= known.bound <= excess + 1e-6 < known.found


@pytest.mark.parametrize("work", [0.0, 1e4, 1e5, 1e6])
def test_a_search_that_is_cut_is_right_and_can_continue(work: float) -> None:
    problem = conflicting(SEEDS[0], transfers=True)
    excess = min(map(problem.peak, all_allowed(problem))) - 1.0
    cut = least_excess(problem, Budget(work_limit=work))
    assert cut.bound <= excess + 1e-6 and cut.found >= excess - 1e-6
    assert cut.cut == (cut.found - cut.bound > 1e-6)
    more = least_excess(problem, Budget(), cut)
    assert more.found == pytest.approx(excess, abs=1e-6) and more.bound == pytest.approx(excess, abs=1e-6)


def test_the_search_is_deterministic() -> None:
    problem = replace(grid(5, 5, 4, 0, memory=True, transfers=True), usage_limit=1.0)

    def once() -> Least:
        return least_excess(problem, Budget(work_limit=2e7))

    one, two = once(), once()
    assert (one.found, one.bound) == (two.found, two.bound)
    assert one.choices is not None and two.choices is not None and (one.choices == two.choices).all()


def test_more_work_never_finds_a_larger_excess(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(grid(6, 6, 4, 0, memory=True, transfers=True), usage_limit=1.0)
    found = []
    for work in (1e6, 1e7, 5e7):
        monkeypatch.setattr(least, "WORK", work)
        found.append(least_excess(problem, Budget()).found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("far", [False, True])
def test_a_limit_that_is_proven_impossible_is_named_well_enough(seed: int, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that their work cuts go on only while choices within the limit may exist, or while the least usage is known neither within a
    twentieth nor within half of what is missing for sure, which is more where the limit is far off."""
    problem = conflicting(seed, transfers=True)
    least_peak = min(map(problem.peak, all_allowed(problem)))
    limit = 1.0 if far else 0.95 * least_peak
    problem = replace(problem, usage_limit=limit)
    monkeypatch.setattr(least, "FIRST_WORK", 8e4)
    rounds: list[float] = []
    whole = least._round
    monkeypatch.setattr(least, "_round", lambda best, budget: (rounds.append(0), whole(best, budget))[1])
    named, taken = least_excess(problem, Budget()), len(rounds)
    assert named.bound <= least_peak - limit + 1e-6 and least_peak - limit - 1e-6 <= named.found
    enough = 0.5 * named.bound if far else 0.05 * (named.found + limit)
    assert named.bound > 0 and named.found - named.bound <= enough
    monkeypatch.setattr(least, "NAMED", 0.0)
    monkeypatch.setattr(least, "FAR", 0.0)
    rounds.clear()
    finer = least_excess(problem, Budget())
    assert taken < len(rounds) and finer.found - finer.bound < named.found - named.bound
