"""Explain why a problem has no solution: forbidden entries that leave no choice, or the limit that would be needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from fxshard.solver.limits.least import Least, least_excess
from fxshard.solver.primal.highs import solve_mip
from fxshard.solver.primal.local_search import greedy
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted, InfeasibleError
from fxshard.solver.problem.model import Model, add_edge, from_problem
from fxshard.solver.problem.problem import PlacementProblem, usage_ceiling
from fxshard.solver.problem.transfers import Transfers
from fxshard.solver.reductions import reduce
from fxshard.solver.reductions.arc_consistency import supported

PROOF = 1e-9
"""Relative difference of sums that counts as rounding."""


class Limits:
    """The least sums under each hard limit of a problem, computed once: by `near` during the search, or by `explain` after it."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self._least: dict[int, Least] = {}

    @cached_property
    def _every(self) -> list[tuple[str, PlacementProblem]]:
        return _limits(self.problem)

    def near(self, budget: Budget) -> tuple[list[IntArray], bool]:
        """Per limit the choices that exceed it least, and whether the problem is proven infeasible."""
        try:
            found = [self._found(index, budget) for index in range(len(self._every))]
        except Exhausted:
            return [], True
        impossible = any(least.bound > PROOF * self._scale(index) for index, least in enumerate(found))
        return [least.choices for least in found if least.choices is not None], impossible

    def explain(self, budget: Budget) -> InfeasibleError:
        """The error for a problem known to have no solution; less exact if the budget ends."""
        model = _hard(self.problem)
        if greedy(model) is None and not possible(model, budget):
            return self._nothing_allowed(model)
        for index, (name, one) in enumerate(self._every):
            try:
                least = self._found(index, budget)
            except Exhausted:
                return self._nothing_allowed(model)
            alone = len(self._every) == 1 or least.bound > PROOF * self._scale(index)
            if least.found > 0 and alone:
                return _missed(name, one, least)
        every = " and ".join(name for name, _ in self._every)
        each = ", though one fits in each" if all(least.found <= 0 for least in self._least.values()) else ""
        return InfeasibleError(f"no allowed choice fits in {every} together{each}")

    def _nothing_allowed(self, model: Model) -> InfeasibleError:
        nodes = tuple(node for node, mask in enumerate(supported(model)) if not mask.any())
        whom = f" for {self.problem.name(nodes[0])} and its neighbours" if nodes else ""
        return InfeasibleError(f"nothing is allowed{whom}: the forbidden entries leave no choice", nodes or tuple(range(len(model))))

    def least_usage(self, budget: Budget) -> InfeasibleError:
        """The least peak memory of a problem with no other limit, as an error that reports it."""
        name, one = self._every[0]
        return _missed(name, one, self._found(0, budget))

    def summary(self) -> str:
        """The findings on the limits that no plan satisfied, for an error message."""
        alone = " and ".join(name for name, _ in self._every) if self.together() else ""
        said = [f"; in {name} {miss.args[0].split(': ')[-1]}" for name, miss in self.missed()]
        return "".join(said) + (f"; each of {alone} can be met alone" if alone else "")

    def together(self) -> tuple[str | None, ...]:
        """The names of the limits' rows (None: memory) if there are several, each of which some choices meet; else empty."""
        several = len(self._every) > 1 and len(self._least) == len(self._every)
        return tuple(one.rows[0].name if one.rows else None for _, one in self._every) if several and not self.missed() else ()

    def missed(self) -> list[tuple[str, InfeasibleError]]:
        """Per limit that no plan satisfied: its description, and the closest found."""
        missed = [(self._every[index], least) for index, least in self._least.items() if least.found > 0]
        return [(name, _missed(name, one, least)) for (name, one), least in missed]

    def _found(self, index: int, budget: Budget) -> Least:
        known = self._least.get(index)
        if known is None or (known.cut and not budget.spent):
            self._least[index] = known = least_excess(self._every[index][1], budget, known)
        return known

    def _scale(self, index: int) -> float:
        one = self._every[index][1]
        return abs(one.rows[0].limit if one.rows else one.usage_limit or 0.0)


def _missed(name: str, one: PlacementProblem, least: Least) -> InfeasibleError:
    limit = one.rows[0].ceiling if one.rows else usage_ceiling(one.usage_limit or 0.0)
    found, bound = limit + least.found, limit + least.bound
    if least.choices is not None:  # summed as `PlacementProblem` does, to round alike
        found = one.totals(least.choices)[0] if one.rows else one.peak(least.choices)
    bound = found if found - bound <= PROOF * abs(found) else min(bound, found)
    what = "sum" if one.rows else "peak"
    message = f"no allowed choice fits in {name}: the least {what} found is {found:.17g}, and none is below {bound:.17g}"
    choices = None if least.choices is None else tuple(int(x) for x in least.choices)
    return InfeasibleError(message, (), found, bound, one.rows[0].name if one.rows else None, choices, least.cut)


def _limits(problem: PlacementProblem) -> list[tuple[str, PlacementProblem]]:
    """Each hard limit: its description, and the problem with that limit alone."""
    limits: list[tuple[str, PlacementProblem]] = []
    if problem.usage_limit is not None and problem.all_lives:
        limits.append((f"{problem.usage_limit:.17g} bytes", replace(problem, rows=())))
    for row in problem.rows:
        if row.hard:
            limits.append((f"{row.name or 'a row'} of {row.limit:.17g}", replace(problem, usage_limit=None, rows=(row,))))
    return limits


def possible(model: Model, budget: Budget) -> bool:
    """Whether a model without rows has any allowed choice; True where the budget ends first."""
    try:
        smaller, _, _ = reduce(model, budget=budget)
    except Exhausted:
        return False
    if not len(smaller):
        return True
    answer = solve_mip(smaller, budget)
    return answer.choices is not None or answer.bound < np.inf


def _hard(problem: PlacementProblem) -> Model:
    """The constraints as a model with costs 0 and inf, without limits and transfers."""
    model = from_problem(replace(problem, usage_limit=None, rows=()))
    costs = [np.where(np.isinf(cost), np.inf, 0.0) for cost in model.costs]
    edges = {pair: np.where(np.isinf(table), np.inf, 0.0) for pair, table in model.edges.items()}
    for transfer in model.transfers:
        if np.isinf(transfer.prices).any():
            forbidden = np.where(np.isinf(transfer.prices), np.inf, 0.0)
            for reader, want in transfer.readers:
                add_edge(edges, transfer.source, reader, forbidden[np.ix_(transfer.have, want)])
    return replace(model, costs=costs, edges=edges, transfers=Transfers())
