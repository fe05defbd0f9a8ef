"""A problem that was solved, to be solved again with states forbidden: what did not change is not done again.

The plan of the first solve is changed where it has to be, and a region around that is solved on its own, bounded by what
the messages of the first solve prove of the rest (`region`). Where bound and plan meet, that is the answer. Where they do not (what all
layers read changes all of them a little), message passing goes on from the first solve's messages, on what they leave (`core`). Limits tie
all nodes together: there multipliers are gone on from too, and the first plan is repaired. Only if all that leaves more of a gap than
will do, the narrower problem is solved from nothing.

The integers of the first solve lack what costs much more than the plan that it began with (`scaling.quantise`): its bounds say
nothing beyond that cost, its *reach*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import BoolArray, FloatArray, IntArray, starts
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import InfeasibleError
from fxshard.solver.problem.model import Model
from fxshard.solver.problem.problem import PlacementProblem
from fxshard.solver.problem.scaling import Scale
from fxshard.solver.problem.solution import Solution, certify
from fxshard.solver.search.branching import Branching
from fxshard.solver.search.case_split import search_by_cases, search_tables
from fxshard.solver.search.combining import combine
from fxshard.solver.search.core_problem import search_left
from fxshard.solver.search.subproblem import Reparametrised
from fxshard.solver.solve import solve_within

Allowed = Mapping[int, BoolArray]
"""Node -> (k,) which of its states are allowed; nodes that are not there may do what they could."""

REGION = 100
"""Nodes of a region."""

REGION_WORK = 300_000_000
"""Table entries that its solve may touch: half a second."""

FIRST_PAIRS = 4
"""Pairs of sweeps with which going on from the first messages begins, before what cannot be in a better plan is left out."""

FURTHER_WORK = 1_500_000_000
"""Those that going on from the first messages may touch."""

WITHIN_WORK = 1_000_000_000
"""Those that it may touch within limits."""

AGAIN_WORK = 1_000_000_000
ALIKE = 2.0
"""Those that solving from nothing may touch where an answer within limits has more than this many times the first solve's gap."""

ASKED = 0.9
"""Part of the gap that is asked for there, since integers round."""

MOST_KEPT = 50_000_000
"""Numbers in the tables of a problem that is kept, 0.4 GB, alike ones counted once; a larger one is solved from nothing again."""

CLOSED = 1e-8
"""Relative gap that integers may leave of a proof."""


class Solved(Protocol):
    """A problem that was solved, and may be asked again with only some states allowed: a `Session`, or what is made of several."""

    solution: Solution

    def again(self, allowed: Allowed, gap: float = ..., *, deep: bool = ..., budget: Budget | None = ...) -> Solution: ...


@dataclass(frozen=True)
class _Root:
    """What message passing proved: of a model whose node i has the `states[i]` of the problem, in integers that mean `scale`."""

    relaxation: Relaxation
    state: tuple[FloatArray, ...]
    proven: Reparametrised
    states: tuple[IntArray, ...]
    scale: Scale
    reach: float

    def inner(self, choices: Sequence[int]) -> IntArray | None:
        """Choices of the problem as those of the model, None where it lacks one."""
        begins, place = self._places
        found = place[begins + np.asarray(choices, dtype=np.int64)]
        return found if (found >= 0).all() else None

    @cached_property
    def _places(self) -> tuple[IntArray, IntArray]:
        """Where the states of each node of the problem begin, and for each of them its number in the model, -1 where it has none."""
        begins = starts([len(costs) for costs in self.relaxation.model.costs])
        place = np.full(begins[-1], -1, dtype=np.int64)
        for begin, states in zip(begins, self.states, strict=False):
            place[begin + states] = np.arange(len(states))
        return begins[:-1], place


class Session:
    """`solution`: of the problem. `again`: of the problem with states forbidden."""

    def __init__(
        self,
        problem: PlacementProblem,
        budget: Budget | None = None,
        start: Sequence[int] | None = None,
        region: int = REGION,
    ) -> None:
        """Solves `problem`; errors as `solve`. budget: None: without a limit. region: of so many nodes a question is asked first."""
        self.problem, self._region = problem, region
        self._budget = Budget() if budget is None else budget
        self._root_of: Callable[[], _Root] | None = None
        self.solution = solve_within(problem, self._budget, start, self._keep)

    def _keep(self, relaxation: Relaxation, scale: Scale, reach: float) -> None:
        """Keeps what the sweeper knows now, before cases use it; what that proves is worked out when it is first asked for.

        Nothing is kept of what is too large.
        """
        if len(relaxation.ascent.sweeper.splits.values) > MOST_KEPT:
            return
        state = relaxation.ascent.sweeper.state()
        self._root_of = lambda: _root(relaxation, state, scale, reach)

    @cached_property
    def _root(self) -> _Root | None:
        root_of, self._root_of = self._root_of, None
        return None if root_of is None else root_of()

    def again(self, allowed: Allowed, gap: float = CLOSED, *, deep: bool = True, budget: Budget | None = None) -> Solution:
        """The cheapest choices among those allowed, with a proven bound; raises `InfeasibleError` where there are none.

        gap: with a larger one an answer will do that is proven to be that near. deep: where what the first solve knows does not get as
        near, solve from nothing; otherwise that is done, but for a second or two, under limits where the answer is proven much less well
        than the first, or where there is no plan at all. budget: None: as much as the first solve had.
        """
        budget = self._budget.anew() if budget is None else budget
        for node, mask in allowed.items():
            if not mask.any():
                raise InfeasibleError(f"no state of {self.problem.name(node)} is allowed", (node,))
        best = None if self._root is None else self._known(self._root, allowed, gap, budget)
        tied = self._root is not None and len(self._root.relaxation.model.limits) > 0
        enough = gap if deep else (ALIKE * self.solution.gap if tied else np.inf)
        if best is not None and best.gap <= max(gap, enough):
            return best
        left = budget if deep or best is None else budget.part(AGAIN_WORK)
        found = solve_within(narrowed(self.problem, allowed), left, None if best is None else best.choices)
        if best is None or deep:
            return found
        cheaper, bound = min(best, found, key=lambda one: one.objective), max(found.lower_bound, best.lower_bound)
        return certify(cheaper.choices, cheaper.objective, min(bound, cheaper.objective), best.cut and found.cut, cheaper.steps)

    def _known(self, root: _Root, allowed: Allowed, gap: float, budget: Budget) -> Solution | None:
        """What follows from the first solve, None where that is no plan."""
        if len(root.relaxation.model.limits):
            return self._within(root, allowed, gap, budget.part(WITHIN_WORK))
        if 2 * self._region > len(self.problem):  # solving all of it is as fast
            return None
        best = self._around(root, allowed, root.proven.near(allowed, self._region), budget.part(REGION_WORK))
        if best is None or best.gap <= gap:
            return best
        found = self._further(root, allowed, best, ASKED * gap, budget.part(FURTHER_WORK))
        return found if found.gap < best.gap else best

    def _around(self, root: _Root, allowed: Allowed, nodes: IntArray, budget: Budget) -> Solution | None:
        """What a region around the nodes in question says, None where it knows no plan."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        plan = root.inner(self.solution.choices)
        if plan is None or not all(mask.any() for mask in kept.values()):
            return None
        region = root.proven.region(nodes)
        found, bound = _searched(region, plan[nodes], _numbered(kept, nodes), budget)
        if found is not None:
            plan[nodes] = found
        surrounded, members = root.proven.surrounded(nodes, plan)
        inside = np.isin(members, nodes)
        better, _ = _searched(surrounded, np.where(inside, plan[members], 0), _numbered(kept, members), budget)
        if better is None:
            return None
        plan[members[inside]] = better[inside]
        choices = np.asarray([states[state] for states, state in zip(root.states, plan, strict=True)])
        objective = self.problem.evaluate(choices)
        if not np.isfinite(objective):
            return None
        proven = min(bound / root.scale.factor - root.scale.margin, root.reach, objective)
        steps = (("region", f"{len(nodes)} nodes of {len(self.problem)}"),)
        return certify(tuple(int(x) for x in choices), objective, proven, budget.spent, steps)

    def _further(self, root: _Root, allowed: Allowed, known: Solution, gap: float, budget: Budget) -> Solution:
        """The whole problem, from a plan and the messages of the first solve on, until the gap is as small or the work is done."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        choices = np.asarray(known.choices, dtype=np.int64)
        narrow = _forbid(root.relaxation.model, allowed), _forbid(root.relaxation.ascent.model, kept)
        relaxation = root.relaxation.from_state(root.state, *narrow, choices, gap, budget)
        relaxation.begin(FIRST_PAIRS)
        assert relaxation.choices is not None
        plan = root.inner(relaxation.choices.tolist())
        if plan is None or not search_left(relaxation, plan, search_by_cases, budget):
            relaxation.run()
        if relaxation.bound < relaxation.cutoff and not budget.spent:
            cases = Branching(relaxation, search_tables, budget)
            cases.run()
            relaxation.prove(cases.bound)
        assert relaxation.choices is not None
        best = tuple(int(x) for x in relaxation.choices)
        objective = self.problem.evaluate(best)
        bound = max(known.lower_bound, min(relaxation.bound / root.scale.factor - root.scale.margin, root.reach))
        return certify(best, objective, min(bound, objective), budget.spent, (("messages of the first solve", "gone on"),))

    def _within(self, root: _Root, allowed: Allowed, gap: float, budget: Budget) -> Solution | None:
        """Within limits, which tie all nodes together: from the messages and multipliers of the first solve, and its plan repaired."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        if not all(mask.any() for mask in kept.values()):
            return None
        choices = _changed(root.relaxation.model, np.asarray(self.solution.choices, dtype=np.int64), allowed, budget)
        narrow = _forbid(root.relaxation.model, allowed), _forbid(root.relaxation.ascent.model, kept)
        relaxation = root.relaxation.from_state(root.state, *narrow, choices, gap, budget)
        relaxation.run()
        combine(relaxation, search_tables, search_by_cases, budget)
        if relaxation.choices is None:
            return None
        best = tuple(int(x) for x in relaxation.choices)
        objective = self.problem.evaluate(best)
        bound = min(relaxation.bound / root.scale.factor - root.scale.margin, root.reach, objective)
        cut = objective - bound > gap * abs(objective)
        return certify(best, objective, max(bound, self.solution.lower_bound), cut, (("multipliers of the first solve", "gone on"),))


def _root(relaxation: Relaxation, state: tuple[FloatArray, ...], scale: Scale, reach: float) -> _Root:
    ascent = relaxation.ascent
    ascent.sweeper.restore(state)
    sizes = np.asarray([len(costs) for costs in ascent.model.costs])
    columns = [relaxation.undo(np.minimum(choice, sizes - 1)) for choice in range(int(sizes.max(initial=0)))]
    states = [row[:size] for row, size in zip(np.stack(columns, axis=1), sizes, strict=True)]
    return _Root(relaxation, state, Reparametrised(ascent), tuple(states), scale, reach)


def _numbered(allowed: Allowed, nodes: IntArray) -> Allowed:
    """By the places of their nodes among others, ascending."""
    return {int(np.searchsorted(nodes, node)): mask for node, mask in allowed.items()}


def _searched(model: Model, plan: IntArray, allowed: Allowed, budget: Budget) -> tuple[IntArray | None, float]:
    """The cheapest choices of a model among those allowed, and a bound on them; `plan` is known without what is forbidden."""
    return search_by_cases(_forbid(model, allowed), _changed(model, plan, allowed, budget), budget)


def narrowed(problem: PlacementProblem, allowed: Allowed) -> PlacementProblem:
    """The problem in which only some states are allowed."""
    costs = list(problem.node_costs)
    for node, mask in allowed.items():
        costs[node] = np.where(mask, costs[node], np.inf)
    return replace(problem, node_costs=tuple(costs))


def _forbid(model: Model, allowed: Allowed) -> Model:
    """The model with other states forbidden by themselves."""
    costs = list(model.costs)
    for node, mask in allowed.items():
        costs[node] = np.where(mask, costs[node], np.inf)
    return replace(model, costs=costs)


def _changed(model: Model, plan: IntArray, allowed: Allowed, budget: Budget) -> IntArray | None:
    """A plan, its states taken out that are not allowed, and then improved; None where such a change is no plan."""
    plan = plan.copy()
    for node, mask in allowed.items():
        if not mask[plan[node]]:
            costs = Polish(model, plan, budget)
            plan[node] = np.where(mask, costs.local[costs.offset[node] : costs.offset[node + 1]], np.inf).argmin()
    narrower = _forbid(model, allowed)
    return Polish(narrower, plan, budget).run() if np.isfinite(narrower.evaluate(plan)) else None
