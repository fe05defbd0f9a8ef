"""Dual ascent: raise the lower bound of a model, and collect plans on the way.

Message passing (TRW-S) raises the bound at fixed multipliers of the rows; cutting planes find the multipliers (`cutting_planes`). A model
without rows needs message passing only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from fxshard.solver.bounds.cutting_planes import Bundle, Plane
from fxshard.solver.bounds.merged_links import MergedSweeper, Merging
from fxshard.solver.bounds.multipliers import RowPrices
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

Offer = Callable[[IntArray, float], float]
"""(a plan that fits, its cost) -> the new cutoff."""

State = tuple[tuple[FloatArray, ...], FloatArray]
"""(the sweeper's arrays, the multipliers that its costs include)."""

MAX_PAIRS = 120
NEARBY = 0.01
"""Relative gain that the bundle's first step may predict when it starts from the multipliers of a similar problem."""

STALL = 0.01
"""By default sweeps end when four pairs together raise the bound by less than this fraction of the gap."""

CONSISTENT = 5
"""Work of decoding with arc consistency, over that of decoding without (measured on Llama 3 8B under a memory limit)."""


class Ascent:
    """Dual ascent on one model.

    bound: the best lower bound so far. multipliers, sweeper: the current state. best_multipliers: those of the best bound. plan: the
    cheapest plan that fits among those decoded from messages, repaired and improved. max_multipliers: (rows,) their upper limits.
    """

    def __init__(self, model: Model, budget: Budget, offer: Offer, stall: float = STALL) -> None:
        self.model, self.budget, self.offer, self.stall = model, budget, offer, stall
        self.sweeper = Sweeper(model)
        self.memory = RowPrices(model)
        self.multipliers = self.memory.round(model.prices)
        self.bound = -np.inf
        self.cutoff = model.cutoff
        self.plan: IntArray | None = None
        self.max_multipliers = model.slopes * (1 - 1e-9)
        self.bundle = Bundle(self)
        self._base = self.sweeper.theta.copy()
        self._allowance = 0.0
        self.rounding = len(model.use_table.flat.lo) + len(model.moving.lo) + 2 if len(model.limits) else 0
        self.best_multipliers = self.multipliers
        self._priced: Model | None = None
        self.set_prices(self.multipliers)

    def narrowed(self, model: Model, cutoff: float, budget: Budget, offer: Offer) -> Ascent:
        """An ascent on a narrower model with the same numbers of states, from the current messages and multipliers.

        The caller forbids states in the sweeper, which both ascents share.
        """
        other = copy(self)
        other.model = other.polish_model = replace(model, cutoff=cutoff)
        other.cutoff, other.budget, other.offer = cutoff, budget, offer
        other.bound, other.plan, other.stall = -np.inf, None, STALL
        other.bundle = Bundle(other, rise=NEARBY)
        other.set_prices(self.multipliers)
        return other

    def merged(self, merging: Merging) -> Ascent:
        """An ascent with merged links, from the current messages and multipliers.

        Both share the prices of separate links: after one was used, the other continues with `set_prices` or `restore`.
        """
        other = copy(self)
        other.sweeper = MergedSweeper(self.sweeper, merging)
        other.bound, other.best_multipliers = -np.inf, self.multipliers
        other.bundle = self.bundle.exactly(other)
        self.budget.charge(2 * other.sweeper.entries)
        return other

    def adopt(self, other: Ascent) -> None:
        """Continue from what an ascent on the same model found: its planes, its plan, and its bound if that is better."""
        self.bundle.planes, self.plan = other.bundle.planes, other.plan
        if other.bound > self.bound:
            self.bound, self.best_multipliers = other.bound, other.best_multipliers
        self.set_prices(self.best_multipliers)

    def state(self) -> State:
        """A copy of messages and splits, and the multipliers, for `restore`."""
        return self.sweeper.state(), self.multipliers

    def restore(self, state: State) -> None:
        """Return to a state saved by `state`."""
        arrays, multipliers = state
        self.sweeper.restore(arrays)
        self._count_prices(multipliers)

    @property
    def done(self) -> bool:
        """Whether the bound has reached the cutoff or the budget is spent."""
        return self.bound >= self.cutoff or self.budget.spent

    def run(self) -> None:
        """Raise the bound until progress slows; the last sweep runs against node order."""
        plan = self.settle()
        if len(self.model.limits) and plan is not None and not self.done:
            self.bundle.run(plan)
            self.set_prices(self.best_multipliers)
            if not self.budget.late:
                self.settle(8)

    def settle(self, pairs: int = MAX_PAIRS) -> IntArray | None:
        """Sweep at the current multipliers until the bound stalls; returns the cheapest choices decoded, which may not fit."""
        best, cost = None, np.inf
        history: list[float] = []
        for _ in range(pairs):
            for direction in (0, 1):
                bound = self._sweep(direction)
                plan = self.decoded(1 - direction)
                if plan is not None and (priced := self.priced(plan)) < cost:
                    best, cost = plan, priced
                    if not len(self.model.limits):
                        self._try(plan)
            history.append(bound)
            if self.done or self._stalled(history, cost):
                break
        best = self.decoded(0, surely=True) if best is None else best
        if best is not None and len(self.model.limits):  # only the best one, since repair is as slow as many sweeps
            self._try(best)
        return best

    def evaluate(self, multipliers: FloatArray, pairs: int, enough: float) -> tuple[float, IntArray | None, float]:
        """Sweep at other multipliers; returns the bound, the cheapest choices decoded, and their cost in the Lagrangian.

        Stops when four pairs gain less than `enough`, or when the bound is within `enough` of that cost. The choices are also repaired,
        improved and offered as a plan.
        """
        self.set_prices(multipliers)
        best, cost = None, np.inf
        history: list[float] = []
        while len(history) < pairs and not (history and self.budget.spent):
            for direction in (0, 1):
                bound = self._sweep(direction)
                plan = self.decoded(1 - direction)
                if plan is not None and (priced := self.priced(plan)) < cost:
                    best, cost = plan, priced
            history.append(bound)
            if history[-1] >= cost - enough or stalled(history, enough, 1.0):
                break
        best = self.decoded(0, surely=True) if best is None else best
        if best is not None:
            if not self.budget.late:
                best, cost = self.improved(best)
            self._try(best)
        return max(history, default=-np.inf), best, cost

    def improved(self, plan: IntArray) -> tuple[IntArray, float]:
        """A plan improved by single changes in the Lagrangian, whether it fits or not, and its cost there."""
        if self._priced is None:
            self._priced = self.memory.priced(self.model, self.multipliers)
        polish = Polish(self._priced, plan, self.budget)
        polish.room = np.full_like(polish.room, np.inf)
        polish.improve()
        return polish.choices, self.priced(polish.choices)

    def pair(self) -> float:
        """Sweep once in each direction; returns the bound, which holds only for the states that the sweeper allows now."""
        for direction in (0, 1):
            bound = self.sweeper.sweep(direction) - self._allowance
            self.budget.charge(self.sweeper.entries)
        return bound

    def prove(self, pairs: int) -> None:
        """Sweep for the bound alone, at most this many pairs, when the known plan is likely to be optimal."""
        for _ in range(pairs):
            if self.done:
                return
            self._record(self.pair())

    def reprice(self, bound: float, planes: Sequence[Plane], steps: int, pairs: int) -> tuple[float, list[Plane]]:
        """Search for better multipliers for the states that the sweeper allows now; returns the best bound and all planes known then.

        bound: the current bound for these states. The ascent ends at the best multipliers.
        """
        bundle = Bundle(self, planes, STALL)
        self.bound, self.best_multipliers = bound, self.multipliers
        plan = self.decoded(0, surely=True)
        if plan is not None:
            self._try(plan)
            bundle.run(plan, steps, pairs)
            if self.multipliers is not self.best_multipliers:
                self.set_prices(self.best_multipliers)
        return self.bound, bundle.planes

    def offer_decoded(self) -> None:
        """Decode a plan from the messages, repair and improve it, and offer it."""
        plan = self.decoded(0, surely=True)
        if plan is not None:
            self._try(plan)

    def suggest(self, plan: IntArray) -> None:
        """Repair, improve and offer choices found elsewhere."""
        self._try(plan)

    def _sweep(self, direction: int) -> float:
        bound = self.sweeper.sweep(direction) - self._allowance
        self.budget.charge(self.sweeper.entries)
        self._record(bound)
        return bound

    def _record(self, bound: float) -> None:
        """Keep a bound and its multipliers if it is the best."""
        if bound > self.bound:
            self.bound, self.best_multipliers = bound, self.multipliers

    def decoded(self, direction: int, surely: bool = False) -> IntArray | None:
        """Choices decoded from the messages; surely: with arc consistency where it takes that. Charges the work."""
        self.budget.charge(self.sweeper.decoded_entries)
        plan = self.sweeper.decode(direction)
        if plan is None and surely:
            self.budget.charge(CONSISTENT * self.sweeper.decoded_entries)
            plan = self.sweeper.decode(direction, consistent=True)
        return plan

    def _stalled(self, history: list[float], cost: float) -> bool:
        """Whether sweeps no longer pay; cost: of the best choices at these multipliers, which bounds the bound from above."""
        if len(history) < 5:
            return history[-1] >= cost
        gap = min(cost, self.cutoff) - history[-1]
        return stalled(history, gap, self.stall) if np.isfinite(gap) else stalled(history, abs(history[-1]), 1e-5)

    def priced(self, plan: IntArray) -> float:
        """The cost of choices in the Lagrangian, less the largest loss by rounding."""
        return self.model.linear(plan) + float(self.multipliers @ self.excess(plan)) - self.rounding

    def set_prices(self, multipliers: FloatArray) -> None:
        multipliers = self.memory.round(multipliers)
        self.sweeper.set_costs(self._base + self.memory.prices(multipliers), self.memory.rates(multipliers))
        self._count_prices(multipliers)

    def _count_prices(self, multipliers: FloatArray) -> None:
        """Record the (rounded) multipliers that the sweeper's costs include now."""
        self.multipliers = multipliers
        self._priced = None
        self._allowance = self.memory.allowance(self.multipliers)
        self.polish_model = self.memory.priced(self.model, np.where(np.isfinite(self.model.slopes), self.multipliers, 0.0))

    def _try(self, plan: IntArray) -> IntArray | None:
        """Repair, improve and offer a plan, and return it; meanwhile each soft row is priced at its multiplier. None: too late."""
        if self.budget.late and self.plan is not None:
            return None
        polished = Polish(self.polish_model, plan, self.budget).run()
        if polished is not None:
            cost = self.model.evaluate(polished)
            self.cutoff = min(self.cutoff, self.offer(polished, cost))
            if self.plan is None or cost < self.model.evaluate(self.plan):
                self.plan = polished.copy()
        return polished

    def scale(self, value: float) -> float:
        """The scale of differences between bounds near `value`, which itself may be 0 far below all plans that fit."""
        return max(abs(value), self.cutoff - value) if np.isfinite(self.cutoff) else abs(value)

    def excess(self, plan: IntArray) -> FloatArray:
        """(rows,) the sums of the choices less the limits."""
        return self.model.usage(plan) - self.model.limits


def stalled(history: list[float], gap: float, part: float) -> bool:
    """Whether the last four pairs of sweeps together raised the bound by no more than the fraction `part` of the gap."""
    return len(history) > 4 and history[-1] - history[-5] <= part * gap
