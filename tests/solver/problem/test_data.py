"""Problems from files: a small example, and published instances if their files are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxshard.solver import PlacementProblem, solve
from tests.solver.problems import brute_force

OPTIMA = [
    pytest.param("iopddl/asplos-2025-iopddl-G.json.gz", 217_039, marks=pytest.mark.slow),
    pytest.param("iopddl/asplos-2025-iopddl-B.json.gz", 532_843, marks=pytest.mark.slow),
    pytest.param("placement/llama3-8b-8layers-8x8.json.gz", 153_376_950),
]


@pytest.mark.parametrize(("limit", "optimum", "choices"), [(24.0, 30.0, (1, 1, 1, 1, 1)), (None, 15.0, (1, 0, 1, 1, 1))])
def test_example(limit: float | None, optimum: float, choices: tuple[int, ...]) -> None:
    """A file written by hand, whose cheapest plan exceeds the memory limit."""
    problem = PlacementProblem.read(Path(__file__).parents[1] / "example.json")
    assert problem.usage_limit == 24 and problem.name(2) == "product" and np.isinf(problem.edge_costs[0][1, 2])
    problem = replace(problem, usage_limit=limit)
    solution = solve(problem)
    assert (solution.choices, solution.objective, solution.lower_bound) == (choices, optimum, optimum)
    assert brute_force(problem) == optimum and solution.proven


@pytest.mark.parametrize(("name", "optimum"), OPTIMA)
def test_optimum(shared_data: Path, name: str, optimum: int) -> None:
    problem = PlacementProblem.read(shared_data / name)
    solution = solve(problem)
    assert problem.feasible(solution.choices)
    assert (solution.objective, solution.lower_bound, solution.gap) == (optimum, optimum, 0.0)
    assert solution.proven and not solution.cut


@pytest.mark.slow
def test_the_bound_of_a_hard_instance_is_valid(shared_data: Path) -> None:
    problem = PlacementProblem.read(shared_data / "iopddl" / "asplos-2025-iopddl-V.json.gz")
    solution = solve(problem, time_limit=60)
    assert problem.feasible(solution.choices)
    assert solution.lower_bound <= 1_617_084 <= solution.objective
