"""Neighbourhood search: the subproblem of freed nodes has the costs and limits of the whole, and search never makes a plan worse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxshard.solver import PlacementProblem
from fxshard.solver.primal.neighbourhood import freed, neighbourhoods
from fxshard.solver.problem.budget import Budget
from fxshard.solver.search.search import ComponentSearch
from tests.solver.problems import brute_force, grid, integer_model, plans, problems, with_rows, without_transfers


@settings(max_examples=80)
@given(
    st.one_of(problems(memory=True, most=5), with_rows(memory=True, most=5).map(without_transfers)),
    st.integers(0, 2**32),
    st.integers(1, 60),
)
def test_the_subproblem_of_freed_nodes_has_the_costs_of_the_whole(problem: PlacementProblem, seed: int, entries: int) -> None:
    model, rng = integer_model(problem), np.random.default_rng(seed)
    every = plans(model)
    if not every:
        return
    choices = every[int(rng.integers(len(every)))]
    nodes = np.asarray(sorted(neighbourhoods(model, choices, rng, entries)), dtype=np.int64)
    assert len(nodes) and len(set(nodes)) == len(nodes)
    part = freed(model, choices, nodes)
    others = np.setdiff1d(np.arange(len(model)), nodes)
    same = [plan for plan in every if (plan[others] == choices[others]).all()]
    assert sorted(part.evaluate(plan[nodes]) for plan in same) == sorted(model.evaluate(plan) for plan in same)
    assert {tuple(plan) for plan in plans(part)} == {tuple(plan[nodes]) for plan in same}


@pytest.mark.parametrize("seed", range(3))
def test_neighbourhood_search_improves_a_plan_and_claims_no_bound(seed: int) -> None:
    problem, rng = grid(3, 4, 3, seed, memory=True, integers=True), np.random.default_rng(seed)
    model = integer_model(problem)
    some = [choices for choices in rng.integers(0, 3, (200, 12)) if model.fits(choices)]
    worst = max(some, key=model.evaluate)
    search = ComponentSearch(model, Budget())
    search.choices, search.value = worst, model.evaluate(worst)
    search._search_neighbourhoods(Budget(work_limit=3e7))
    assert search.bound == -np.inf and search.choices is not None
    assert model.fits(search.choices) and model.evaluate(search.choices) == search.value
    assert brute_force(problem) <= search.value < model.evaluate(worst)
