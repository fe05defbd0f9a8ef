"""The certificate of a solve that is cut: by enumeration, bound <= optimum <= cost of the plan."""

from __future__ import annotations

import pytest

from fxshard.solver import NoPlanError, solve
from tests.solver.problems import brute_force, grid

EXACT = 1e-9


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("transfers", [False, True])
def test_bound_optimum_and_plan_are_in_order_at_every_limit(memory: bool, transfers: bool) -> None:
    """The limits on work range from one that ends the search at once to some that it does not reach."""
    cut, worse, proven = 0, 0, 0
    for seed in range(4):
        problem = grid(3, 3 if memory else 4, 4 if memory else 3, seed, memory=memory, transfers=transfers)
        optimum = brute_force(problem)
        for limit in (50.0 * 4**k for k in range(11)):
            try:
                solution = solve(problem, work_limit=limit)
            except NoPlanError:
                continue
            assert problem.feasible(solution.choices)
            assert solution.lower_bound * (1 - EXACT) <= optimum <= solution.objective * (1 + EXACT)
            assert solution.cut == (not solution.proven) == (solution.gap > 0)
            cut += solution.cut
            worse += solution.objective > optimum * (1 + EXACT)
            proven += solution.proven
    assert cut and worse and proven
