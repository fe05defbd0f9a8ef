"""Where message passing meets no plan that fits: repair from near the limits, proofs, and search, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import InfeasibleError, PlacementProblem, bounds, solve
from fxshard.solver.budget import Budget
from fxshard.solver.conflicts import Limits
from tests.solver.problems import brute_force, plans, with_rows
from tests.solver.problems import integer_model as model_of


@settings(max_examples=100, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_the_optimum_without_a_plan_from_message_passing(problem: PlacementProblem) -> None:
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds.Ascent, "_try", lambda ascent, plan: None)
        if np.isinf(best):
            with pytest.raises(InfeasibleError):
                solve(problem)
        else:
            assert solve(problem).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(with_rows(hard=True, memory=True))
def test_limits_that_are_said_to_be_impossible_are(problem: PlacementProblem) -> None:
    starts, impossible = Limits(problem).near(Budget())
    if plans(model_of(problem)):
        assert not impossible
    assert all(len(choices) == len(problem) for choices in starts)
