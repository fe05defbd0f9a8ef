"""The published instances, where their files are at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxshard.solver import PlacementProblem, solve

OPTIMA = [
    pytest.param("iopddl/asplos-2025-iopddl-G.json.gz", 217_039, marks=pytest.mark.slow),
    pytest.param("iopddl/asplos-2025-iopddl-B.json.gz", 532_843, marks=pytest.mark.slow),
    pytest.param("placement/llama3-8b-8layers-8x8.json.gz", 153_376_950),
]


def test_example(shared_data: Path) -> None:
    solution = solve(PlacementProblem.read(shared_data / "iopddl" / "example.json"))
    assert solution.choices == (0, 0, 2, 1, 0)
    assert (solution.objective, solution.lower_bound, solution.proven) == (445, 445, True)


@pytest.mark.parametrize(("name", "optimum"), OPTIMA)
def test_optimum(shared_data: Path, name: str, optimum: int) -> None:
    problem = PlacementProblem.read(shared_data / name)
    solution = solve(problem)
    assert problem.feasible(solution.choices)
    assert (solution.objective, solution.lower_bound, solution.gap) == (optimum, optimum, 0.0)
    assert solution.proven and not solution.cut


@pytest.mark.slow
def test_a_hard_instance_keeps_a_true_bound(shared_data: Path) -> None:
    problem = PlacementProblem.read(shared_data / "iopddl" / "asplos-2025-iopddl-V.json.gz")
    solution = solve(problem, time_limit=60)
    assert problem.feasible(solution.choices)
    assert solution.lower_bound <= 1_617_084 <= solution.objective
