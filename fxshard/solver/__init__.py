"""Choose one strategy per node at the least total cost, with a proof: numbers in, numbers out.

>>> solution = solve(PlacementProblem.read("example.json"))
"""

from .budget import Budget
from .expand import expand
from .infeasible import InfeasibleError, NoPlanError
from .limited import Counts, LimitedSession
from .problem import PlacementProblem
from .rows import Live, Row
from .session import Session, Solved
from .solution import Solution
from .solve import solve, solve_within
from .timeline import Timeline
from .transfers import Transfer
from .warm_up import warm_up

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
    "expand",
    "solve",
    "solve_within",
    "warm_up",
]
