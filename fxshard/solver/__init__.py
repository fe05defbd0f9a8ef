"""Choose one strategy per node at the least total cost, with a proof: numbers in, numbers out.

>>> solution = solve(PlacementProblem.read("example.json"))
"""

from .expand import expand
from .infeasible import InfeasibleError, NoPlanError
from .problem import PlacementProblem
from .rows import Live, Row
from .session import Session
from .solution import Solution
from .solve import solve
from .transfers import Transfer

__all__ = ["InfeasibleError", "Live", "NoPlanError", "PlacementProblem", "Row", "Session", "Solution", "Transfer", "expand", "solve"]
