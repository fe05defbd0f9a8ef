"""Compile the solver's loops ahead of time: the first compilation after installation takes longer than many time limits."""

from __future__ import annotations

from functools import cache

import numpy as np

from fxshard.solver.bounds.merged_links import MergedSweeper, Merging
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import from_problem
from fxshard.solver.problem.problem import PlacementProblem
from fxshard.solver.problem.rows import Live
from fxshard.solver.problem.transfers import Transfer
from fxshard.solver.session import Session

NODES, STATES = 9, 3

WORK = 3e6
"""Work of each solve, in table entries."""


@cache
def warm_up() -> None:
    """Solve tiny problems, with and without a limit, that call every compiled loop; once per process. Half a second with a disk cache."""
    rng = np.random.default_rng(0)
    costs = tuple(rng.uniform(0, 4, STATES) for _ in range(NODES))
    layouts = np.arange(STATES)
    transfers = tuple(
        Transfer(node, layouts, tuple(((node + step) % NODES, rng.permutation(STATES)) for step in (1, 2, 4)), _prices(rng))
        for node in range(NODES)
    )
    lives = tuple(Live(t, t + 3, rng.uniform(0, 9, STATES), t) for t in range(NODES - 3))
    lives += tuple(Live(t, t + 2, _prices(rng), transfer=t) for t in range(NODES - 3))
    free = PlacementProblem(costs, transfers=transfers, lives=lives)
    peak = free.peak(Session(free, Budget(work_limit=WORK)).solution.choices)
    limited = PlacementProblem(costs, transfers=transfers, lives=lives, usage_limit=0.9 * peak)
    Session(limited, Budget(work_limit=WORK)).again({0: layouts > 0})
    separate = Sweeper(from_problem(free))
    merged = MergedSweeper(separate, Merging.of(separate.wiring)).splits
    merged.separated([merged.table(number) for number in range(len(merged.links))])


def _prices(rng: np.random.Generator) -> np.ndarray:
    return np.where(np.eye(STATES, dtype=bool), 0.0, rng.uniform(1, 3, (STATES, STATES)))
