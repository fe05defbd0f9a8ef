"""PlacementProblem: cost, memory, file, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from fxshard.solver import PlacementProblem
from tests.solver.problems import problems

TWO = (np.array([1.0, 2.0]), np.array([3.0, np.inf]))


def test_parallel_edges_add_up() -> None:
    table = np.array([[5.0, 7.0], [np.inf, 0.0]])
    problem = PlacementProblem(TWO, ((0, 1), (1, 0)), (table, table.T))
    assert problem.evaluate([0, 0]) == 1 + 3 + 5 + 5
    assert not problem.feasible([1, 0])
    assert not problem.feasible([0, 1])


def test_peak_counts_half_open_intervals() -> None:
    usages = (np.array([4.0, 1.0]), np.array([3.0, 3.0]))
    together = PlacementProblem(TWO, usages=usages, intervals=((0, 2), (1, 3)), usage_limit=6)
    apart = PlacementProblem(TWO, usages=usages, intervals=((0, 2), (2, 3)), usage_limit=6)
    assert together.peak([0, 0]) == 7
    assert not together.feasible([0, 0])
    assert together.feasible([1, 0])
    assert apart.peak([0, 0]) == 4


def test_usage_without_an_interval_does_not_count() -> None:
    problem = PlacementProblem(TWO, usages=(np.array([9.0, 9.0]), None), intervals=(None, (0, 5)), usage_limit=1)
    assert problem.peak([0, 0]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"edges": ((0, 2),), "edge_costs": (np.zeros((2, 2)),)}, r"edges\[0\] = \(0, 2\) names a node"),
        ({"edges": ((0, 1),), "edge_costs": (np.zeros((2, 3)),)}, r"edge_costs\[0\] .* expected \(2, 2\)"),
        ({"edges": ((0, 1),)}, "1 edges but 0 edge_costs"),
        ({"usages": (np.zeros(2),)}, "usages has 1 entries for 2 nodes"),
        ({"usages": (np.zeros(3), None)}, r"usages\[0\] must be 2 finite numbers"),
        ({"node_names": ("x",)}, "node_names has 1 entries"),
    ],
)
def test_arguments_that_do_not_match_are_refused(arguments: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PlacementProblem(TWO, **arguments)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_and_negative_infinite_costs_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"node_costs\[0\] contains nan or -inf"):
        PlacementProblem((np.array([0.0, bad]),))


@settings(max_examples=50)
@given(problems(memory=True))
def test_a_file_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, problem: PlacementProblem) -> None:
    folder: Path = tmp_path_factory.mktemp("iopddl")
    for name in ("problem.json", "problem.json.gz"):
        problem.write(folder / name)
        again = PlacementProblem.read(folder / name)
        assert (again.edges, again.intervals, again.usage_limit) == (
            problem.edges,
            problem.intervals,
            problem.usage_limit,
        )
        for ours, theirs in zip([*problem.node_costs, *problem.edge_costs], [*again.node_costs, *again.edge_costs], strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for use, read in zip(problem.usages, again.usages, strict=True):
            np.testing.assert_array_equal(np.zeros(0) if use is None else use, np.zeros(0) if read is None else read)
