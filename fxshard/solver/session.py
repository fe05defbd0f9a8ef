"""Incremental re-solving: a solved problem is solved again with some states forbidden, from the results of the first solve.

First, the plan is changed where necessary and a region around the change is solved on its own; the messages of the first solve bound the
rest (`subproblem`). If bound and plan meet, that is the answer. If not (a value that all layers read changes all of them a little),
message passing continues from the first solve's messages, on the states that they do not exclude (`core_problem`). Limits couple all
nodes: there the multipliers continue too, and the first plan is repaired. Only if the gap is still too large is the narrower problem
solved from scratch.

The integer costs of the first solve omit entries far more expensive than its first plan (`scaling.quantise`), so that its bounds hold only
up to that cost, its *reach*.
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
from fxshard.solver.search.core_problem import search_remaining
from fxshard.solver.search.subproblem import Reparametrised
from fxshard.solver.solve import solve_within

Allowed = Mapping[int, BoolArray]
"""Node -> (k,) mask of its allowed states; nodes that are missing keep all their states."""

REGION = 100
"""The number of nodes of a region."""

REGION_WORK = 300_000_000
"""Work of solving a region, in table entries: half a second."""

FIRST_PAIRS = 4
"""Pairs of sweeps from the first solve's messages before states that are in no better plan are removed."""

FURTHER_WORK = 1_500_000_000
"""Work of continuing from the first solve's messages, without limits."""

WITHIN_WORK = 1_000_000_000
"""Work of the same with limits."""

AGAIN_WORK = 1_000_000_000
ALIKE = 2.0
"""Work of solving from scratch where the answer to a problem with limits has more than ALIKE times the gap of the first solve."""

ASKED = 0.9
"""Fraction of the requested gap that continued message passing aims for, since integers round."""

MOST_KEPT = 50_000_000
"""The most table entries of a relaxation that is kept (0.4 GB; shared tables count once); a larger problem is re-solved from scratch."""

CLOSED = 1e-8
"""Relative gap that rounding to integers may leave in a proof."""


class Solved(Protocol):
    """A solved problem that can be solved again with only some states allowed: a `Session`, or a combination of several."""

    solution: Solution

    def again(self, allowed: Allowed, gap: float = ..., *, deep: bool = ..., budget: Budget | None = ...) -> Solution: ...


@dataclass(frozen=True)
class _Root:
    """The result of message passing in the first solve, on a model in which node i has the problem's states `states[i]`.

    state: of the sweeper. snapshot: the reparameterised model. scale: of the integer costs. reach: the real cost up to which bounds hold.
    """

    relaxation: Relaxation
    state: tuple[FloatArray, ...]
    snapshot: Reparametrised
    states: tuple[IntArray, ...]
    scale: Scale
    reach: float

    def inner(self, choices: Sequence[int]) -> IntArray | None:
        """The problem's choices as choices of the model, None where the model lacks one of the states."""
        begins, place = self._places
        found = place[begins + np.asarray(choices, dtype=np.int64)]
        return found if (found >= 0).all() else None

    @cached_property
    def _places(self) -> tuple[IntArray, IntArray]:
        """The offsets of the problem's nodes in a flat array of states, and that array: each state's index in the model, or -1."""
        begins = starts([len(costs) for costs in self.relaxation.model.costs])
        place = np.full(begins[-1], -1, dtype=np.int64)
        for begin, states in zip(begins, self.states, strict=False):
            place[begin + states] = np.arange(len(states))
        return begins[:-1], place


class Session:
    """A solved problem. `solution` is its solution; `again` solves it with some states forbidden."""

    def __init__(
        self,
        problem: PlacementProblem,
        budget: Budget | None = None,
        start: Sequence[int] | None = None,
        region: int = REGION,
    ) -> None:
        """Solves `problem`; raises as `solve`. budget: None: unlimited. region: number of nodes of the region that `again` tries first."""
        self.problem, self._region = problem, region
        self._budget = Budget() if budget is None else budget
        self._root_of: Callable[[], _Root] | None = None
        self.solution = solve_within(problem, self._budget, start, self._keep)

    def _keep(self, relaxation: Relaxation, scale: Scale, reach: float) -> None:
        """Save the sweeper's state, unless it is too large, before branch and bound changes it. `_root` is computed when first needed."""
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

        gap: the relative gap that is good enough. deep: solve from scratch where the first solve's results do not reach that gap. If not
        deep, that happens only where they give no plan, or where limits leave a gap much larger than the first solve's; it then ends
        after a second or two. budget: None: that of the first solve.
        """
        budget = self._budget.anew() if budget is None else budget
        for node, mask in allowed.items():
            if not mask.any():
                raise InfeasibleError(f"no state of {self.problem.name(node)} is allowed", (node,))
        best = None if self._root is None else self._from_root(self._root, allowed, gap, budget)
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

    def _from_root(self, root: _Root, allowed: Allowed, gap: float, budget: Budget) -> Solution | None:
        """The best solution obtained from the first solve's results, None where they give no plan."""
        if len(root.relaxation.model.limits):
            return self._continue_limited(root, allowed, gap, budget.part(WITHIN_WORK))
        if 2 * self._region > len(self.problem):  # solving all of it is as fast
            return None
        best = self._solve_region(root, allowed, root.snapshot.near(allowed, self._region), budget.part(REGION_WORK))
        if best is None or best.gap <= gap:
            return best
        found = self._continue(root, allowed, best, ASKED * gap, budget.part(FURTHER_WORK))
        return found if found.gap < best.gap else best

    def _solve_region(self, root: _Root, allowed: Allowed, nodes: IntArray, budget: Budget) -> Solution | None:
        """The solution from solving a region, `nodes`, with the rest as it was; None where no plan is found."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        plan = root.inner(self.solution.choices)
        if plan is None or not all(mask.any() for mask in kept.values()):
            return None
        region = root.snapshot.region(nodes)
        found, bound = _searched(region, plan[nodes], _numbered(kept, nodes), budget)
        if found is not None:
            plan[nodes] = found
        surrounded, members = root.snapshot.surrounded(nodes, plan)
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

    def _continue(self, root: _Root, allowed: Allowed, known: Solution, gap: float, budget: Budget) -> Solution:
        """The whole problem, from a known plan and the first solve's messages, until the gap is reached or the budget ends."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        choices = np.asarray(known.choices, dtype=np.int64)
        narrow = _forbid(root.relaxation.model, allowed), _forbid(root.relaxation.ascent.model, kept)
        relaxation = root.relaxation.from_state(root.state, *narrow, choices, gap, budget)
        relaxation.begin(FIRST_PAIRS)
        assert relaxation.choices is not None
        plan = root.inner(relaxation.choices.tolist())
        if plan is None or not search_remaining(relaxation, plan, search_by_cases, budget):
            relaxation.run()
        if relaxation.bound < relaxation.cutoff and not budget.spent:
            cases = Branching(relaxation, search_tables, budget)
            cases.run()
            relaxation.prove(cases.bound)
        assert relaxation.choices is not None
        best = tuple(int(x) for x in relaxation.choices)
        objective = self.problem.evaluate(best)
        bound = max(known.lower_bound, min(relaxation.bound / root.scale.factor - root.scale.margin, root.reach))
        return certify(best, objective, min(bound, objective), budget.spent, (("messages of the first solve", "continued"),))

    def _continue_limited(self, root: _Root, allowed: Allowed, gap: float, budget: Budget) -> Solution | None:
        """A problem with limits: continue from the first solve's messages, multipliers and (repaired) plan."""
        kept = {node: mask[root.states[node]] for node, mask in allowed.items()}
        if not all(mask.any() for mask in kept.values()):
            return None
        choices = _changed(root.relaxation.model, np.asarray(self.solution.choices, dtype=np.int64), allowed, budget)
        narrow = _forbid(root.relaxation.model, allowed), _forbid(root.relaxation.ascent.model, kept)
        relaxation = root.relaxation.from_state(root.state, *narrow, choices, gap, budget)
        relaxation.run()
        combine(relaxation, search_tables, budget)
        if relaxation.choices is None:
            return None
        best = tuple(int(x) for x in relaxation.choices)
        objective = self.problem.evaluate(best)
        bound = min(relaxation.bound / root.scale.factor - root.scale.margin, root.reach, objective)
        cut = objective - bound > gap * abs(objective)
        return certify(best, objective, max(bound, self.solution.lower_bound), cut, (("multipliers of the first solve", "continued"),))


def _root(relaxation: Relaxation, state: tuple[FloatArray, ...], scale: Scale, reach: float) -> _Root:
    relaxation.tight = ascent = relaxation.ascent  # what was merged is released
    ascent.sweeper.restore(state)
    sizes = np.asarray([len(costs) for costs in ascent.model.costs])
    columns = [relaxation.undo(np.minimum(choice, sizes - 1)) for choice in range(int(sizes.max(initial=0)))]
    states = [row[:size] for row, size in zip(np.stack(columns, axis=1), sizes, strict=True)]
    return _Root(relaxation, state, Reparametrised(ascent), tuple(states), scale, reach)


def _numbered(allowed: Allowed, nodes: IntArray) -> Allowed:
    """The masks with each node replaced by its index in `nodes` (ascending)."""
    return {int(np.searchsorted(nodes, node)): mask for node, mask in allowed.items()}


def _searched(model: Model, plan: IntArray, allowed: Allowed, budget: Budget) -> tuple[IntArray | None, float]:
    """The cheapest allowed choices of a model, and a bound on them; plan: a plan of the model that may use forbidden states."""
    return search_by_cases(_forbid(model, allowed), _changed(model, plan, allowed, budget), budget)


def narrowed(problem: PlacementProblem, allowed: Allowed) -> PlacementProblem:
    """The problem with only some states allowed."""
    costs = list(problem.node_costs)
    for node, mask in allowed.items():
        costs[node] = np.where(mask, costs[node], np.inf)
    return replace(problem, node_costs=tuple(costs))


def _forbid(model: Model, allowed: Allowed) -> Model:
    """The model with the cost of all other states set to `inf`."""
    costs = list(model.costs)
    for node, mask in allowed.items():
        costs[node] = np.where(mask, costs[node], np.inf)
    return replace(model, costs=costs)


def _changed(model: Model, plan: IntArray, allowed: Allowed, budget: Budget) -> IntArray | None:
    """The plan with each forbidden state replaced by the cheapest allowed one, then improved; None where the result is not a plan."""
    plan = plan.copy()
    for node, mask in allowed.items():
        if not mask[plan[node]]:
            costs = Polish(model, plan, budget)
            plan[node] = np.where(mask, costs.local[costs.offset[node] : costs.offset[node + 1]], np.inf).argmin()
    narrower = _forbid(model, allowed)
    return Polish(narrower, plan, budget).run() if np.isfinite(narrower.evaluate(plan)) else None
