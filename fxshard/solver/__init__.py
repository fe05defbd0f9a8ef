"""Choose one strategy per node at the least total cost, with a proven bound. Input and output are plain numbers.

>>> solution = solve(PlacementProblem.read("example.json"))
"""

from fxshard.solver.limited import Counts, LimitedSession
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import InfeasibleError, NoPlanError
from fxshard.solver.problem.problem import PlacementProblem
from fxshard.solver.problem.rows import Live, Row
from fxshard.solver.problem.solution import Solution
from fxshard.solver.problem.timeline import Timeline
from fxshard.solver.problem.transfers import Transfer
from fxshard.solver.session import Session, Solved
from fxshard.solver.solve import solve, solve_within
from fxshard.solver.warm_up import warm_up

__all__ = [
    "Budget",
    "Counts",
    "InfeasibleError",
    "LimitedSession",
    "Live",
    "NoPlanError",
    "PlacementProblem",
    "Row",
    "Session",
    "Solution",
    "Solved",
    "Timeline",
    "Transfer",
    "solve",
    "solve_within",
    "warm_up",
]
