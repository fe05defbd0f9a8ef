"""Branch and bound on a relaxation whose bound does not meet its plan.

A *case* allows some states of every node. Message passing bounds it, pruning narrows it, and what is small enough is
searched exactly; else it becomes two, in which a state of a node is chosen, or not allowed. Where plans of equal cost are
mixed (mirror images on a mesh of equal axes, layer by layer), each half chosen, no message raises the bound, and one such
choice settles much of the rest. Cases are taken depth first: the way to the first small one is a dive for a good plan.
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
"""(a model without transfers, the cost of the plan at hand, work) -> (a cheaper plan if found, a bound on all that are)."""

SMALL = 60_000
"""Table entries up to which a case is searched exactly."""

AIMED = 150_000
"""Those up to which what is below a low target is: that happens a few times only."""

SEARCH_WORK = 300_000_000
"""Entries that such a search may touch; a case that takes more is divided."""

AIMS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
"""Parts of the gap that are tried as cutoffs at first."""

PAIRS = 24
"""Pairs of sweeps at most that bound a case; they end when four pairs rise by less than STALL of the gap."""

STALL = 0.02
STEPS, STEP_PAIRS = 8, 12
"""Multipliers that are tried in a case, and pairs of sweeps at each."""

SMALL_GAP = 1e-3
PROOF_WORK = 1.5e9
"""Entries that may be touched to prove a plan that is known to be so near, where work is limited at all."""

WORTH = 0.8
"""Part of the gap that twice the work may leave, where work is limited; what closes less of it is not worth more."""

NARROWS = 0.9
"""Pruning is repeated while it leaves less than this part of the states."""

PROBES = 6
PROBE_PAIRS = 2
"""Nodes that are tried before a case is divided, and the sweeps that each half gets."""

NEAR = 0.02
"""A state whose excess is below this part of the room is as good as chosen."""

SETTLING_PAIRS = 50
SETTLED = 0.01
SETTLING_WORK, SETTLING_PART = 2e9, 0.2
"""Before there are cases, so many pairs of sweeps at a time go on while they gain this part of the gap. They may touch so many entries
in all, and this part of those that are left."""

TABLE_WORK = 2e4
"""What it takes to write down and to reduce one node's or edge's table of a case, however small: 0.1 ms."""

SAVED_BYTES = 2**28
"""Messages that are kept for cases to come; beyond, a case starts from the root's."""


@dataclass(frozen=True)
class _Case:
    """allowed: (states,). bound: proven for it. start: a state of the sweeper that allows no less."""

    allowed: BoolArray
    bound: float
    start: State
    planes: tuple[Plane, ...] = ()


class Branching:
    """The cases of one relaxation, which gets the plans that are found; `bound` is proven for all that are better."""

    def __init__(self, relaxation: Relaxation, search: Search, budget: Budget) -> None:
        self.relaxation, self.ascent, self.budget, self._search = relaxation, relaxation.ascent, budget, search
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
        """The least bound of a case that is open, `inf` where none is."""
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
                halves = self._halves(case)
                self._open += halves
                self._diving = bool(halves)

    def _next(self) -> _Case:
        """The half that was just made, or, where there is none, the case of least bound that is open."""
        if not self._diving:
            at = min(range(len(self._open)), key=lambda k: (self._open[k].bound, -k))
            self._open.append(self._open.pop(at))
        return self._open.pop()

    def _enough(self) -> bool:
        """Whether as much work as a small gap is worth has been done since it is small, or twice the work closed little of a larger one.

        Never where seconds limit the search.
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
        """Sweep over the whole until that gains little: messages of a tight problem go on rising for long, slowly but cheaply.

        Not where the gap is small, which cases close sooner, nor where less work is left than a proof is worth, as in questions.
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
            case = replace(case, bound=max(case.bound, bound))
            if case.bound - before <= SETTLED * max(0.0, self.relaxation.cutoff - case.bound):
                break
            before = case.bound
        self.ascent.decoded()
        self._root = self.ascent.state()
        self._open = [replace(case, start=self._root)] if case.bound < self.relaxation.cutoff else []

    def _aim(self) -> None:
        """Search exactly what is below low targets, while that is small: most often the best plan is not far above the bound.

        Not where all targets lie within what makes no plan better.
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

    def _halves(self, case: _Case) -> tuple[_Case, ...]:
        """What is left to look at of a case, the more promising half last."""
        self.count += 1
        self.ascent.restore(case.start)
        self.sweeper.allow(case.allowed)
        try:
            bound = max(case.bound, self._sweep(PAIRS))
            bound, planes = self._repriced(case, bound)
            slacks, allowed = self._narrow(case.allowed)
            candidates = self._candidates(slacks)
            if not candidates:
                self.relaxation.take(np.asarray([costs.argmin() for costs in slacks.costs]))
                return ()
            proven = self._searched(slacks, self.relaxation.cutoff, self.relaxation.value, SMALL)
        except Exhausted:
            return ()
        pair = _opposed(planes, self.ascent.multipliers)
        if pair is not None:
            parted = self._parted(*pair, slacks)
            if parted is not None:
                here = self.ascent.state() if len(self._open) < self._saved else self._root
                low = max(bound, proven or bound)
                return tuple(_Case(allowed & half, low, here, planes) for half in parted)
        halves = self._divided(candidates, allowed, slacks, bound if proven is None else max(bound, proven))
        return tuple(replace(half, planes=planes) for half in halves)

    def _repriced(self, case: _Case, bound: float) -> tuple[float, tuple[Plane, ...]]:
        """The bound at better multipliers, and the planes that led there; a plan on the way. Raises `Exhausted` as `_sweep`."""
        if not len(self.ascent.model.limits):
            self.ascent.decoded()
            return bound, ()
        first = self.sweeper.offset[:-1]
        known = [plane for plane in case.planes if case.allowed[first + plane.choices].all()]
        bound, planes = self.ascent.reprice(bound, known, STEPS, STEP_PAIRS)
        if bound >= self.relaxation.cutoff:
            raise Exhausted
        return bound, tuple(planes)

    def _sweep(self, pairs: int) -> float:
        """Pairs of sweeps; the bound, raises `Exhausted` when no better plan is left."""
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
        """Forbid what is in no better plan, as long as much goes."""
        while True:
            slacks = find_slacks(self.ascent, self.relaxation.cutoff)
            left = np.isfinite(slacks.excess)
            self.sweeper.allow(left)
            if self.budget.spent or left.sum() > NARROWS * allowed.sum():
                return slacks, left
            allowed = left
            self._sweep(PROBE_PAIRS)

    def _searched(self, slacks: Slacks, target: float, known: float, small: int) -> float | None:
        """Search what is left below a target exactly: a bound on what costs less than `known`, None where it is not small enough."""
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

    def _divided(self, candidates: list[int], allowed: BoolArray, slacks: Slacks, bound: float) -> tuple[_Case, ...]:
        """Two cases at most, by the node whose halves are both bounded best; none where the bound says that nothing is left."""
        if bound >= self.relaxation.cutoff:
            return ()
        here = self.ascent.state()
        best: list[_Case] = []
        for node in candidates:
            halves = [self._probed(half, bound, here) for half in self._split(node, allowed, slacks)]
            if not best or min(h.bound for h in halves) > min(h.bound for h in best):
                best = halves
            if self.budget.spent:
                break
        start = here if len(self._open) < self._saved else self._root
        cases = [replace(half, start=start) for half in best if half.bound < self.relaxation.cutoff]
        return tuple(sorted(cases, key=lambda half: -half.bound))

    def _parted(self, over: IntArray, under: IntArray, slacks: Slacks) -> tuple[BoolArray, BoolArray] | None:
        """The states of a node on the side of one plan, and those on the side of another, where they are furthest apart."""
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

    def _candidates(self, slacks: Slacks) -> list[int]:
        """Nodes of which two states are as good as chosen, first where a third costs most; then the others."""
        ranked = []
        for node, excess in enumerate(np.split(slacks.excess, self.sweeper.offset[1:-1])):
            if np.isfinite(excess).sum() > 1:
                least = np.sort(excess)
                third = least[2] if len(least) > 2 else np.inf
                ranked.append((bool(least[1] > NEAR * slacks.room), -min(third, slacks.room), node))
        return [node for _, _, node in sorted(ranked)[:PROBES]]

    def _split(self, node: int, allowed: BoolArray, slacks: Slacks) -> tuple[BoolArray, BoolArray]:
        """With the least state of a node alone, and without it."""
        low, high = self.sweeper.offset[node], self.sweeper.offset[node + 1]
        state = low + int(slacks.excess[low:high].argmin())
        chosen, other = allowed.copy(), allowed.copy()
        chosen[low:high] = False
        chosen[state], other[state] = True, False
        return chosen, other

    def _probed(self, allowed: BoolArray, bound: float, here: State) -> _Case:
        """A half with the bound that a few sweeps give."""
        self.ascent.restore(here)
        self.sweeper.allow(allowed)
        try:
            return _Case(allowed, max(bound, self._sweep(PROBE_PAIRS)), here)
        except Exhausted:
            return _Case(allowed, np.inf, here)


def _opposed(planes: Sequence[Plane], multipliers: FloatArray) -> tuple[IntArray, IntArray] | None:
    """The plans of the lowest planes that rise and that fall with the multipliers, None where all do the same."""
    ranked = sorted(planes, key=lambda plane: plane.at(multipliers))
    over = next((plane.choices for plane in ranked if multipliers @ plane.excess > 0), None)
    under = next((plane.choices for plane in ranked if multipliers @ plane.excess <= 0), None)
    return None if over is None or under is None else (over, under)
