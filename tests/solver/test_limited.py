"""Problems whose memory is known only for complete choices, between a lower and an upper count, against enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxshard.solver import Budget, Counts, InfeasibleError, LimitedSession, Live, NoPlanError, PlacementProblem, Solution, limited
from fxshard.solver.limits import least

TIMES, STATES = 4, 3


def counts(seed: int, spread: float, limit: float) -> Counts:
    """Five nodes in a ring. The memory of each choice at each time is random, between the two counts.

    spread: by which part of the upper count the lower one is smaller at most.
    """
    rng = np.random.default_rng(seed)
    costs = tuple(rng.uniform(0, 10, STATES) for _ in range(5))
    edges = tuple((i, (i + 1) % 5) for i in range(5))
    tables = tuple(rng.uniform(0, 5, (STATES, STATES)) for _ in edges)
    spans = [sorted(rng.choice(TIMES + 1, 2, replace=False)) for _ in range(8)]
    amounts = [rng.uniform(0, 10, STATES) for _ in spans]
    nodes = rng.integers(0, 5, len(spans))
    lives = [Live(int(lo), int(hi), amount, int(node)) for (lo, hi), amount, node in zip(spans, amounts, nodes, strict=True)]
    problem = PlacementProblem(costs, edges, tables, usage_limit=limit, lives=tuple(lives))
    relaxed = replace(problem, lives=tuple(replace(one, amount=one.amount * rng.uniform(1 - spread, 1, STATES)) for one in lives))
    parts = rng.uniform(0, 1, (STATES,) * 5 + (TIMES,))

    def counted(choices: Sequence[int]) -> np.ndarray:
        low, high = (_at(one, choices) for one in (relaxed, problem))
        return low + (high - low) * parts[tuple(choices)]

    return Counts(problem, relaxed, counted)


def _at(problem: PlacementProblem, choices: Sequence[int]) -> np.ndarray:
    return np.array([sum(one.total((), choices) for one in problem.lives if one.lo <= t < one.hi) for t in range(TIMES)])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]), st.sampled_from([14.0, 18.0, 22.0]))
@example(5026, 0.1, 22.0)  # the choices of least memory are not allowed
def test_bounds_errors_and_plans_are_true(seed: int, spread: float, limit: float) -> None:
    given_ = counts(seed, spread, limit)
    held = {x: float(given_.counted(x).max()) for x in itertools.product(range(STATES), repeat=5)}
    costs = {x: given_.problem.evaluate(x) for x in held if held[x] <= limit}
    try:
        session = LimitedSession(given_, Budget(work_limit=1e9))
    except InfeasibleError as error:
        assert not costs and error.usage_bound <= min(held.values()) + 1e-6
        assert error.least_usage == pytest.approx(held[error.least_choices])
        return
    except NoPlanError as error:
        (miss,) = error.misses
        assert spread and miss.usage_bound <= min(held.values()) + 1e-6 and miss.least_usage == pytest.approx(held[miss.least_choices])
        assert limit < miss.least_usage
        return
    best = min(costs.values())
    assert tuple(session.solution.choices) in costs
    assert session.solution.lower_bound <= best + 1e-9 <= session.solution.objective + 2e-9
    assert spread or session.solution.proven
    node = seed % 5
    allowed = {node: np.arange(STATES) != session.solution.choices[node]}
    others = [cost for x, cost in costs.items() if x[node] != session.solution.choices[node]]
    try:
        again = session.again(allowed)
    except InfeasibleError as error:
        assert not others, error
        return
    except NoPlanError:
        assert spread
        return
    assert tuple(again.choices) in costs and allowed[node][again.choices[node]]
    assert again.lower_bound <= min(others) + 1e-9


def test_the_relaxed_problem_is_corrected_where_it_is_too_low() -> None:
    """The cheapest choices fit by the relaxed problem but not by the true count. Once corrected, the next ones are found."""
    costs = (np.array([1.0, 2.0, 9.0]),)
    problem = PlacementProblem(costs, usage_limit=10.0, lives=(Live(0, 2, np.array([20.0, 20.0, 1.0]), 0),))
    relaxed = replace(problem, lives=(Live(0, 2, np.array([10.0, 8.0, 1.0]), 0),))
    truth = {0: [11.0, 10.0], 1: [9.0, 8.0], 2: [1.0, 1.0]}
    found = LimitedSession(Counts(problem, relaxed, lambda x: np.array(truth[int(x[0])])), Budget(work_limit=1e9)).solution
    assert found.choices == (1,) and found.objective == 2.0 and found.lower_bound == 1.0 and not found.proven


def test_solving_again_after_a_correction_has_the_bound_of_the_relaxed_problem() -> None:
    """The correction excludes the choice of cost 2, which fits: the cost that is found with it, 9, bounds nothing."""
    costs = (np.array([1.0, 2.0, 9.0]),)
    problem = PlacementProblem(costs, usage_limit=10.0, lives=(Live(0, 2, np.array([20.0, 20.0, 1.0]), 0),))
    relaxed = replace(problem, lives=(Live(0, 2, np.array([8.0, 9.0, 1.0]), 0),))
    session = LimitedSession(Counts(problem, relaxed, lambda x: np.full(2, [11.0, 9.0, 1.0][x[0]])), Budget(work_limit=1e9))
    again = session.again({0: np.array([True, True, True])})
    assert again.choices == (2,) and again.lower_bound <= 2.0 and not again.proven


def test_all_solves_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relaxed problem gets 65 % of the work, its corrections a quarter of the rest, and so on; ``again`` keeps 35 % for
    plans that fit."""
    costs = (np.array([1.0, 2.0, 9.0]),)
    problem = PlacementProblem(costs, usage_limit=10.0, lives=(Live(0, 2, np.array([20.0, 20.0, 1.0]), 0),))
    relaxed = replace(problem, lives=(Live(0, 2, np.array([10.0, 8.0, 1.0]), 0),))
    given: list[float] = []

    class Counting(limited.Session):
        def __init__(self, problem: PlacementProblem, budget: Budget, start: Sequence[int] | None) -> None:
            given.append(budget.work_left or 0.0)
            super().__init__(problem, budget, start)
            budget.charge(budget.work_left or 0.0)

        def again(self, *args: object, budget: Budget, **options: object) -> Solution:
            given.append(budget.work_left or 0.0)
            budget.charge(budget.work_left or 0.0)
            return self.solution

    monkeypatch.setattr(limited, "Session", Counting)
    held = Counts(problem, relaxed, lambda x: np.array([11.0, 11.0, 1.0][x[0]] * np.ones(2)))
    session = LimitedSession(held, Budget(work_limit=8e6))
    assert given == pytest.approx([5.2e6, 0.7e6, 0.525e6, 1.575e6])
    del given[:]
    session.again({0: np.array([True, True, True])})
    assert given == pytest.approx([5.2e6])


@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_the_least_peak_of_each_count_is_searched_once(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least peak of the relaxed problem proves that nothing fits. It does not depend on the limit, and equals that of enumeration."""
    given_, searched = counts(3, spread, 1.0), []
    real = least.least_excess
    watched = lambda problem, *rest: searched.append(problem.lives) or real(problem, *rest)  # noqa: E731
    monkeypatch.setattr("fxshard.solver.limits.conflicts.least_excess", watched)
    with pytest.raises(InfeasibleError) as caught:
        LimitedSession(given_, Budget(work_limit=1e9))
    assert searched == [given_.relaxed.lives, given_.problem.lives]
    every = list(itertools.product(range(STATES), repeat=5))
    assert caught.value.usage_bound == pytest.approx(min(_at(given_.relaxed, x).max() for x in every))
    assert caught.value.least_usage == pytest.approx(given_.counted(caught.value.least_choices).max())
