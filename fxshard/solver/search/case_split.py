"""The search of one model: message passing, then combination of plans and branch and bound; or presolve and search per component."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, components, restrict
from fxshard.solver.reductions import reduce
from fxshard.solver.search.branching import Branching
from fxshard.solver.search.combining import combine
from fxshard.solver.search.core_problem import is_large, search_cores
from fxshard.solver.search.search import ComponentSearch
from fxshard.solver.search.tied_limits import start_from_tied
from fxshard.solver.search.tied_model import search_tied

WRITTEN_ENTRIES = 100_000
"""A model of at most this many table entries is converted to tables without pruning where no plan that fits is known; the result is up to
sixty times as large."""

MESSAGES = 0.8
"""Fraction of the remaining budget for message passing where there are limits; combining its plans takes the rest."""

Steps = list[tuple[str, str]]
Near = Callable[[Budget], tuple[list[IntArray], bool]]
"""Budget -> (choices that exceed each limit least, whether the problem is proven infeasible)."""


def search_by_cases(
    model: Model,
    first: IntArray | None,
    budget: Budget,
    steps: Steps | None = None,
    shown: Callable[[Relaxation], None] | None = None,
    near: Near | None = None,
) -> tuple[IntArray | None, float]:
    """Search a model with transfers: message passing, then branch and bound if a gap remains. Returns (the best plan, a lower bound).

    first: a known plan. shown: called with the relaxation before branching. near: called where message passing finds no plan that fits,
    for choices that nearly fit or a proof that none does.
    """
    steps = [] if steps is None else steps
    try:
        relaxation = Relaxation(model, first, budget)
    except Exhausted:
        return None, np.inf
    limited = len(relaxation.ascent.model.limits) > 0
    if limited and start_from_tied(relaxation, budget):
        combine(relaxation, search_tables, budget)
        steps.append(("tied model", f"plan {relaxation.value:.0f}"))
    elif search_tied(relaxation, search_by_cases, budget):
        steps.append(("tied model", f"plan {relaxation.value:.0f}"))
    elif is_large(relaxation):
        search_cores(relaxation, search_by_cases, budget)
        steps.append(("search cores", f"plan {relaxation.value:.0f}"))
    relaxation.run(budget.share(MESSAGES) if limited else None)
    steps.append(("message passing", f"bound {relaxation.bound:.0f}, plan {relaxation.value:.0f}"))
    if np.isinf(relaxation.value) and near is not None and not budget.spent:
        starts, impossible = near(budget)
        if impossible:
            return None, np.inf
        for choices in starts:
            plan = Polish(model, choices, budget).run()
            if plan is not None:
                relaxation.offer(plan)
        steps.append(("least excess over limits", f"plan {relaxation.value:.0f}"))
        if np.isfinite(relaxation.value):
            relaxation.run()
            steps.append(("message passing", f"bound {relaxation.bound:.0f}, plan {relaxation.value:.0f}"))
    if limited:
        combine(relaxation, search_tables, budget)
        steps.append(("combine plans", f"plan {relaxation.value:.0f}"))
    if np.isinf(relaxation.value) and relaxation.model.entries <= WRITTEN_ENTRIES:
        _first_plan(relaxation, budget, steps)
    if shown is not None:
        shown(relaxation)
    if relaxation.bound < relaxation.cutoff and np.isfinite(relaxation.value):
        cases = Branching(relaxation, search_tables, budget)
        cases.run()
        relaxation.prove(cases.bound)
        steps.append(("cases", f"{cases.count}: bound {relaxation.bound:.0f}, plan {relaxation.value:.0f}"))
    return relaxation.choices, relaxation.bound


def _first_plan(relaxation: Relaxation, budget: Budget, steps: Steps) -> None:
    """Find a first plan where message passing found none that fits: convert the whole model to tables, and search these."""
    try:
        left, undo = relaxation.below(relaxation.cutoff)
        steps.append(("write transfers as tables", left.describe()))
        found, proven = search_tables(left, np.inf, budget, steps)
    except Exhausted:
        found, proven = None, np.inf
    if found is not None:
        relaxation.offer(undo(found))
    relaxation.prove(proven)


def search_tables(
    model: Model, known: float, budget: Budget, steps: Steps | None = None, *, grows: bool = False
) -> tuple[IntArray | None, float]:
    """Search a model without transfers: (choices that cost less than `known`, if found, and a lower bound on all such choices).

    The bound is at least `known` where there are none, and `inf` where no choice is allowed and `known` is `inf`. grows: continue until
    proven or the budget ends; otherwise the search also stops when further progress is expensive. Once the time limit has passed,
    nothing is searched, and the bound is `-inf`.
    """
    if budget.late:
        return None, -np.inf
    try:
        model, undo, history = reduce(model, budget=budget)
    except Exhausted:
        return None, known
    steps = [] if steps is None else steps
    steps += history
    choices, bound, whole = np.zeros(len(model), dtype=np.int64), model.constant, True
    parts = sorted(components(model), key=len)
    for nodes in parts:
        part = ComponentSearch(restrict(model, nodes, max(1.0, float(model.grain // len(parts)))), budget, grows=grows)
        if nodes is parts[-1]:
            part.value = known - bound  # above it the whole plan is no better than `known`, even with all other parts at their bounds
        part.run()
        steps += part.history
        if part.bound == np.inf:
            return None, known
        bound += max(0.0, part.bound)  # presolve leaves no negative entries
        if part.choices is None:
            whole = False
        else:
            choices[nodes] = part.choices
    return undo(choices) if whole else None, bound
