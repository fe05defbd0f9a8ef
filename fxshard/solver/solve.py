"""Solve a placement problem: reductions, then each connected part on its own, then the certificate."""

from __future__ import annotations

import numpy as np

from .budget import Budget
from .conflicts import explain
from .infeasible import Exhausted, NoPlanError
from .local_search import greedy
from .model import Model, components, from_problem, restrict
from .problem import PlacementProblem
from .reductions import reduce
from .scaling import quantise
from .search import PartSearch
from .solution import Solution, certify


def solve(problem: PlacementProblem, time_limit: float | None = None, work_limit: float | None = None) -> Solution:
    """The cheapest allowed choices that fit in memory, with a proven lower bound.

    time_limit: seconds after which the best plan so far is returned, marked `cut`. work_limit: the same in table entries
    touched (10^9 take a second or two), which gives the same plan on every machine. Raises `InfeasibleError` where there is
    no plan, `NoPlanError` where a limit ended the search before it found one.
    """
    budget = Budget(time_limit, work_limit)
    raw = from_problem(problem)
    first = greedy(raw)
    cost = raw.evaluate(first) if first is not None and raw.fits(first) else np.inf
    model, scale = quantise(raw, cost)
    steps = [("integer costs", f"times {scale.factor:g}: {model.describe()}")]
    try:
        model, undo, history = reduce(model)
    except Exhausted:
        raise explain(problem, solve) from None
    steps += history
    parts = components(model)
    choices = np.zeros(len(model), dtype=np.int64)
    bound = model.constant
    for nodes in parts:
        part = PartSearch(restrict(model, nodes, max(1.0, float(model.grain // len(parts)))), budget)
        part.run()
        if part.choices is None:
            raise explain(problem, solve) if part.proven else NoPlanError(_unfinished(budget))
        choices[nodes] = part.choices
        bound += part.bound
        steps += part.history
    final = tuple(int(x) for x in undo(choices))
    objective = problem.evaluate(final)
    lower = min(max(bound / scale.factor - scale.margin, _trivial_bound(raw)), objective)
    return certify(final, objective, lower, budget.spent, tuple(steps))


def _trivial_bound(model: Model) -> float:
    """The sum of the least entry of every table; exact where costs are zero."""
    return model.constant + sum(float(t.min()) for t in (*model.costs, *model.edges.values()))


def _unfinished(budget: Budget) -> str:
    reason = "the time or work limit ended the search" if budget.spent else "the problem is too large to search exactly"
    return f"no plan that fits was found, nor a proof that there is none: {reason}; allow more time or more memory"
