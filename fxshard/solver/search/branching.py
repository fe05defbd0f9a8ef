"""Branch and bound on a relaxation whose bound does not meet its plan.

A *case* is a branch-and-bound node: it allows some states of every node of the model. Message passing bounds it and pruning narrows it. A
small case is searched exactly; a larger one is split in two, with a state of some node chosen or forbidden. If the relaxation mixes plans
of equal cost (mirror images on a mesh of equal axes, layer by layer), no message raises the bound, but one such choice settles much of the
rest. The search is depth first until a case is closed, and thereby dives for a good plan; then the case of least bound is next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.bounds.bounds import State, stalled
from fxshard.solver.bounds.cutting_planes import Plane
from fxshard.solver.bounds.pruning import Slacks, find_slacks
from fxshard.solver.bounds.relax import Relaxation
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import BoolArray, FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model

Search = Callable[[Model, float, Budget], tuple[IntArray | None, float]]
"""(a model without transfers, the cost of the known plan, work) -> (a cheaper plan if found, a lower bound on all cheaper plans)."""

SMALL = 60_000
"""The most table entries of a case that is searched exactly."""

AIMED = 150_000
"""The same for the model below a low target, which is searched only a few times."""

SEARCH_WORK = 300_000_000
"""Work of such a search, in table entries; a case that takes more is split."""

AIMS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Fractions of the gap tried as cutoffs at first."""

PAIRS = 24
"""The most pairs of sweeps that bound a case; they end when four pairs raise the bound by less than STALL of the gap."""

STALL = 0.02
STEPS, STEP_PAIRS = 8, 12
"""Multipliers tried in a case, and pairs of sweeps at each."""

CHEAP = 0.05
"""Fraction of the work left that trying them may take while diving."""

SMALL_GAP = 1e-3
PROOF_WORK = 1.5e9
"""Relative gap that counts as small, and the work, in table entries, of closing a small gap where work is limited."""

WORTH = 0.8
"""With limited work, the search ends if doubling the work leaves more than this fraction of the gap."""

NARROWS = 0.9
"""Pruning is repeated while it leaves at most this fraction of the states."""

HALF_PAIRS = 2
"""Pairs of sweeps that bound a half before it is kept as a case."""

NEAR = 0.02
"""A state with an excess below this fraction of the room counts as nearly optimal."""

SETTLING_PAIRS = 50
SETTLED = 0.01
SETTLING_WORK, SETTLING_PART = 2e9, 0.2
"""Before branching, batches of SETTLING_PAIRS pairs of sweeps continue while each gains this fraction of the gap. Their work is limited, in
table entries and as a fraction of the work left."""

TABLE_WORK = 2e4
"""Work charged for building and reducing one table of a case, however small: 0.1 ms."""

SAVED_BYTES = 2**28
"""Memory for messages saved with open cases; beyond it, a case starts from the root's messages."""


@dataclass(frozen=True)
class _Case:
    """allowed: (states,) mask. bound: its lower bound. start: a saved state of the sweeper that allows at least these states."""

    allowed: BoolArray
    bound: float
    start: State
    planes: tuple[Plane, ...] = ()


class Branching:
    """Branch and bound on one relaxation, to which it offers the plans found. `bound` is a lower bound on all better plans."""

    def __init__(self, relaxation: Relaxation, search: Search, budget: Budget) -> None:
        self.relaxation, self.ascent, self.budget, self._search = relaxation, relaxation.tight, budget, search
        self.sweeper = self.ascent.sweeper
        self.count = 0
        self._diving = True
        self._begun: float | None = None
        self._small_since: float | None = None
        self._look_at, self._seen = PROOF_WORK, np.inf
        self._root = self.ascent.state()
        self._saved = SAVED_BYTES // sum(array.nbytes for array in self._root[0])
        self._open = [_Case(np.ones(len(self.sweeper.theta), dtype=bool), relaxation.bound, self._root, tuple(self.ascent.bundle.planes))]

    @property
    def bound(self) -> float:
        """The least bound of the open cases, `inf` where none is left."""
        return min((case.bound for case in self._open), default=np.inf)

    def run(self) -> None:
        """Close cases until none is left or the budget ends."""
        self._settle()
        self._aim()
        while self._open and not self.budget.spent:
            if self._enough():
                self.budget.end()
                break
            case = self._next()
            if case.bound < self.relaxation.cutoff:
                halves = self._branch(case)
                self._open += halves
                self._diving = bool(halves)

    def _next(self) -> _Case:
        """The last half made while diving, else the open case of least bound."""
        if not self._diving:
            at = min(range(len(self._open)), key=lambda k: (self._open[k].bound, -k))
            self._open.append(self._open.pop(at))
        return self._open.pop()

    def _enough(self) -> bool:
        """Whether to stop: PROOF_WORK was spent since the gap became small, or doubling the work closed little of a larger gap.

        False unless work is limited.
        """
        left, gap = self.budget.work_left, self.relaxation.value - min(self.bound, self.relaxation.cutoff)
        if left is None:
            return False
        self._begun = left if self._begun is None else self._begun
        done = self._begun - left
        if gap <= SMALL_GAP * abs(self.relaxation.value):
            self._small_since = left if self._small_since is None else self._small_since
            return self._small_since - left > PROOF_WORK
        if done < self._look_at:
            return False
        before, self._seen, self._look_at = self._seen, gap, 2 * max(done, PROOF_WORK / 2)
        return gap > WORTH * before

    def _settle(self) -> None:
        """Sweep over the whole model until that gains little: on tight problems messages keep raising the bound, slowly but cheaply.

        Skipped where the gap is small, since branching closes it sooner, and where less than PROOF_WORK is left, as in re-solves.
        """
        (case,) = self._open
        before, work, left = case.bound, 0, self.budget.work_left
        small = self.relaxation.cutoff - case.bound <= SMALL_GAP * abs(self.relaxation.value)
        if small or (left is not None and left < PROOF_WORK):
            return
        most = SETTLING_WORK if left is None else min(SETTLING_WORK, SETTLING_PART * left)
        while work < most and not self.budget.spent:
            for _ in range(SETTLING_PAIRS):
                bound = self.ascent.pair()
                work += 2 * self.sweeper.entries
                if self.budget.late:
                    break
            case = replace(case, bound=max(case.bound, bound))
            if case.bound - before <= SETTLED * max(0.0, self.relaxation.cutoff - case.bound):
                break
            before = case.bound
        self.ascent.offer_decoded()
        self._root = self.ascent.state()
        self._open = [replace(case, start=self._root)] if case.bound < self.relaxation.cutoff else []

    def _aim(self) -> None:
        """Search exactly below increasing low targets while the pruned model is small: the best plan is often just above the bound.

        Skipped where the gap is within the grain.
        """
        if not self._open or self.relaxation.cutoff - self._open[0].bound <= self.relaxation.model.grain:
            return
        (case,) = self._open
        for part in AIMS:
            target = np.ceil(case.bound + part * (self.relaxation.cutoff - case.bound))
            if target >= self.relaxation.cutoff or self.budget.spent:
                break
            try:
                proven = self._searched(find_slacks(self.ascent, target), target, target, AIMED)
            except Exhausted:
                proven = target
            if proven is None:
                break
            case = replace(case, bound=max(case.bound, min(proven, target)))
        self._open = [case]

    def _branch(self, case: _Case) -> tuple[_Case, ...]:
        """Process a case; returns the cases that remain of it, the more promising last."""
        self.count += 1
        self.ascent.restore(case.start)
        self.sweeper.allow(case.allowed)
        try:
            bound = max(case.bound, self._sweep(PAIRS))
            bound, planes = self._repriced(case, bound)
            slacks, allowed = self._narrow(case.allowed)
            node = self._undecided(slacks)
            if node is None:
                self.relaxation.take(np.asarray([costs.argmin() for costs in slacks.costs]))
                return ()
            proven = self._searched(slacks, self.relaxation.cutoff, self.relaxation.value, SMALL)
        except Exhausted:
            return ()
        pair = _opposed(planes, self.ascent.multipliers)
        if pair is not None:
            parted = self._split_between(*pair, slacks)
            if parted is not None:
                here = self.ascent.state() if len(self._open) < self._saved else self._root
                low = max(bound, proven or bound)
                return tuple(_Case(allowed & half, low, here, planes) for half in parted)
        halves = self._halves(node, allowed, slacks, bound if proven is None else max(bound, proven))
        return tuple(replace(half, planes=planes) for half in halves)

    def _repriced(self, case: _Case, bound: float) -> tuple[float, tuple[Plane, ...]]:
        """The bound at better multipliers, and the planes used; offers plans on the way. Raises `Exhausted` as `_sweep`.

        While diving in a large model the multipliers stay: more cases find better plans than fewer with better bounds.
        """
        if not len(self.ascent.model.limits):
            self.ascent.offer_decoded()
            return bound, ()
        first = self.sweeper.offset[:-1]
        known = [plane for plane in case.planes if case.allowed[first + plane.choices].all()]
        steps = 0 if self._diving and not self._repricing_is_cheap() else STEPS
        bound, planes = self.ascent.reprice(bound, known, steps, STEP_PAIRS)
        if bound >= self.relaxation.cutoff:
            raise Exhausted
        return bound, tuple(planes)

    def _repricing_is_cheap(self) -> bool:
        left = self.budget.work_left
        return left is None or 2 * STEPS * STEP_PAIRS * self.sweeper.entries <= CHEAP * left

    def _sweep(self, pairs: int) -> float:
        """Sweep at most `pairs` times in both directions and return the bound; raises `Exhausted` when it reaches the cutoff."""
        history: list[float] = []
        for _ in range(pairs):
            history.append(self.ascent.pair())
            gap = self.relaxation.cutoff - history[-1]
            if gap <= 0:
                raise Exhausted
            if self.budget.spent or stalled(history, gap, STALL):
                break
        return max(history)

    def _narrow(self, allowed: BoolArray) -> tuple[Slacks, BoolArray]:
        """Prune states that are in no better plan, repeatedly while that removes many; returns the slacks and the allowed states."""
        while True:
            slacks = find_slacks(self.ascent, self.relaxation.cutoff)
            left = np.isfinite(slacks.excess)
            self.sweeper.allow(left)
            if self.budget.spent or left.sum() > NARROWS * allowed.sum():
                return slacks, left
            allowed = left
            self._sweep(HALF_PAIRS)

    def _searched(self, slacks: Slacks, target: float, known: float, small: int) -> float | None:
        """Search the pruned model below a target exactly; returns a bound on plans cheaper than `known`, None if too large or late."""
        if self.budget.late:
            return None
        alive = np.asarray([np.isfinite(costs).sum() for costs in slacks.costs])
        ends = self.sweeper.wiring.ends
        if (alive[ends[0]] * alive[ends[1]]).sum() > small:
            return None
        left, undo = self.relaxation.written(slacks, target)
        self.budget.charge(TABLE_WORK * (len(left) + len(left.edges)))
        if left.entries > small:
            return None
        choices, proven = self._search(left, known, self.budget.part(SEARCH_WORK))
        if choices is not None:
            self.relaxation.take(undo(choices))
        return proven

    def _halves(self, node: int, allowed: BoolArray, slacks: Slacks, bound: float) -> tuple[_Case, ...]:
        """Split at a node; returns the halves that remain below the cutoff after a few sweeps, the more promising last."""
        if bound >= self.relaxation.cutoff:
            return ()
        here = self.ascent.state()
        start = here if len(self._open) < self._saved else self._root
        halves = [replace(self._bounded(half, bound, here), start=start) for half in self._split(node, allowed, slacks)]
        return tuple(sorted((half for half in halves if half.bound < self.relaxation.cutoff), key=lambda half: -half.bound))

    def _split_between(self, over: IntArray, under: IntArray, slacks: Slacks) -> tuple[BoolArray, BoolArray] | None:
        """Split the states of the node on which two plans differ most: masks of those nearer to `under`'s choice, and of the others."""
        model, offset = self.ascent.memory.priced(self.ascent.model, self.ascent.multipliers), self.sweeper.offset
        both = [Polish(model, plan, self.budget).local for plan in (over, under)]
        away = [local - np.repeat(local[offset[:-1] + plan], np.diff(offset)) for local, plan in zip(both, (over, under), strict=True)]
        first, second = offset[:-1] + over, offset[:-1] + under
        open_ = np.isfinite(slacks.excess[first]) & np.isfinite(slacks.excess[second]) & (over != under)
        if not open_.any():
            return None
        apart = np.where(open_, np.minimum(away[0][second], away[1][first]), -np.inf)
        ranked = np.flatnonzero(apart >= apart.max())
        node = int(ranked[len(ranked) // 2])
        low, high = offset[node], offset[node + 1]
        near = away[0][low:high] < away[1][low:high]
        near[over[node]], near[under[node]] = True, False
        halves = []
        for side in (~near, near):
            half = np.ones(len(slacks.excess), dtype=bool)
            half[low:high] = side
            halves.append(half)
        return halves[0], halves[1]

    def _undecided(self, slacks: Slacks) -> int | None:
        """The node to branch on, None where each node has one state left: of the nodes with two nearly optimal states, if there are any,
        the one whose third has the greatest excess."""
        ranked = []
        for node, excess in enumerate(np.split(slacks.excess, self.sweeper.offset[1:-1])):
            if np.isfinite(excess).sum() > 1:
                least = np.sort(excess)
                third = least[2] if len(least) > 2 else np.inf
                ranked.append((bool(least[1] > NEAR * slacks.room), -min(third, slacks.room), node))
        return min(ranked)[2] if ranked else None

    def _split(self, node: int, allowed: BoolArray, slacks: Slacks) -> tuple[BoolArray, BoolArray]:
        """The allowed states with the node fixed to its state of least excess, and with that state forbidden."""
        low, high = self.sweeper.offset[node], self.sweeper.offset[node + 1]
        state = low + int(slacks.excess[low:high].argmin())
        chosen, other = allowed.copy(), allowed.copy()
        chosen[low:high] = False
        chosen[state], other[state] = True, False
        return chosen, other

    def _bounded(self, allowed: BoolArray, bound: float, here: State) -> _Case:
        """A half as a case, bounded by a few sweeps."""
        self.ascent.restore(here)
        self.sweeper.allow(allowed)
        try:
            return _Case(allowed, max(bound, self._sweep(HALF_PAIRS)), here)
        except Exhausted:
            return _Case(allowed, np.inf, here)


def _opposed(planes: Sequence[Plane], multipliers: FloatArray) -> tuple[IntArray, IntArray] | None:
    """The plans of the lowest plane that rises and of the lowest that falls with the multipliers, None where either is missing."""
    ranked = sorted(planes, key=lambda plane: plane.at(multipliers))
    over = next((plane.choices for plane in ranked if multipliers @ plane.excess > 0), None)
    under = next((plane.choices for plane in ranked if multipliers @ plane.excess <= 0), None)
    return None if over is None or under is None else (over, under)
