"""Raise the bound and collect plans: sweeps at fixed memory prices, and the search for the prices.

Without memory it is TRW-S alone. Rows have multipliers, found by cutting planes (`cutting_planes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np

from fxshard.solver.bounds.cutting_planes import Bundle, Plane
from fxshard.solver.bounds.multipliers import RowPrices
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.primal.local_search import Polish
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

Offer = Callable[[IntArray, float], float]
"""Hand in a plan that fits and its cost; returns the cutoff that now holds."""

State = tuple[tuple[FloatArray, ...], FloatArray]
"""What the sweeper holds, and the multipliers of its costs."""

MAX_PAIRS = 120
NEARBY = 0.01
"""What the first reach of the bundle would gain where the multipliers are known of a problem that is nearly the same."""

STALL = 0.01
"""Sweeps end when four pairs together raise the bound by less than this part of the gap, unless told otherwise."""


class Ascent:
    """The bound on one model: `bound` is the best proven, `multipliers` and `sweeper` the state that proves it; `plan` the cheapest
    that fits of those decoded, repaired and polished."""

    def __init__(self, model: Model, budget: Budget, offer: Offer, stall: float = STALL) -> None:
        self.model, self.budget, self.offer, self.stall = model, budget, offer, stall
        self.sweeper = Sweeper(model)
        self.memory = RowPrices(model)
        self.multipliers = self.memory.round(model.prices)
        self.bound = -np.inf
        self.cutoff = model.cutoff
        self.plan: IntArray | None = None
        self.dearest = model.slopes * (1 - 1e-9)
        self.bundle = Bundle(self)
        self._base = self.sweeper.theta.copy()
        self._allowance = 0.0
        self.rounding = len(model.use_table.flat.lo) + len(model.moving.lo) + 2 if len(model.limits) else 0
        self.best_multipliers = self.multipliers
        self.set_prices(self.multipliers)

    def narrowed(self, model: Model, cutoff: float, budget: Budget, offer: Offer) -> Ascent:
        """The same on a model of as many states, some of them forbidden in the sweeper, with its messages and multipliers as they stand."""
        other = copy(self)
        other.model = other.polished = replace(model, cutoff=cutoff)
        other.cutoff, other.budget, other.offer = cutoff, budget, offer
        other.bound, other.plan, other.stall = -np.inf, None, STALL
        other.bundle = Bundle(other, rise=NEARBY)
        other.set_prices(self.multipliers)
        return other

    def state(self) -> State:
        """Messages, splits and multipliers as they are, to come back to."""
        return self.sweeper.state(), self.multipliers

    def restore(self, state: State) -> None:
        """Come back to a state."""
        arrays, multipliers = state
        self.sweeper.restore(arrays)
        self._count_prices(multipliers)

    @property
    def done(self) -> bool:
        """Whether nothing below the cutoff is left, or time is up."""
        return self.bound >= self.cutoff or self.budget.spent

    def run(self) -> None:
        """Raise the bound as far as it is cheap; afterwards the sweeper stands after a sweep against node order."""
        plan = self.settle()
        if len(self.model.limits) and plan is not None and not self.done:
            self.bundle.run(plan)
            self.set_prices(self.best_multipliers)
            self.settle(8)

    def settle(self, pairs: int = MAX_PAIRS) -> IntArray | None:
        """Sweep at the present prices until the bound stalls; the cheapest choices decoded, whether they fit or not."""
        best, cost = None, np.inf
        history: list[float] = []
        for _ in range(pairs):
            for direction in (0, 1):
                bound = self._sweep(direction)
                plan = self._decode(1 - direction)
                if plan is not None and (priced := self.priced(plan)) < cost:
                    best, cost = plan, priced
                    if not len(self.model.limits):
                        self._try(plan)
            history.append(bound)
            if self.done or self._stalled(history, cost):
                break
        if best is not None and len(self.model.limits):  # repair takes as long as many sweeps
            self._try(best)
        return best

    def evaluate(self, multipliers: FloatArray, pairs: int, enough: float) -> tuple[float, IntArray | None, float]:
        """Sweep at other multipliers until four pairs gain less than `enough`, or the bound is so near to what is decoded: the bound,
        the cheapest choices decoded, and what they cost there. They are repaired and handed in."""
        self.set_prices(multipliers)
        best, cost = None, np.inf
        history: list[float] = []
        while len(history) < pairs and not (history and self.budget.spent):
            for direction in (0, 1):
                bound = self._sweep(direction)
                plan = self._decode(1 - direction)
                if plan is not None and (priced := self.priced(plan)) < cost:
                    best, cost = plan, priced
            history.append(bound)
            if history[-1] >= cost - enough or stalled(history, enough, 1.0):
                break
        if best is not None:
            self._try(best)
        return max(history, default=-np.inf), best, cost

    def pair(self) -> float:
        """A sweep in each direction; its bound, which is none on the model while the sweeper allows only some states."""
        for direction in (0, 1):
            bound = self.sweeper.sweep(direction) - self._allowance
            self.budget.charge(self.sweeper.entries)
        return bound

    def prove(self, pairs: int) -> None:
        """Sweep for the bound alone, so many times there and back at most, where a plan is known that is thought to be the best."""
        for _ in range(pairs):
            if self.done:
                return
            self._record(self.pair())

    def reprice(self, bound: float, planes: Sequence[Plane], steps: int, pairs: int) -> tuple[float, list[Plane]]:
        """Look for better multipliers of what the sweeper allows now, whose bound is given: the best bound, and the planes then known.

        Ends at the best multipliers.
        """
        bundle = Bundle(self, planes, STALL)
        self.bound, self.best_multipliers = bound, self.multipliers
        plan = self._decode(0)
        if plan is not None:
            self._try(plan)
            bundle.run(plan, steps, pairs)
            if self.multipliers is not self.best_multipliers:
                self.set_prices(self.best_multipliers)
        return self.bound, bundle.planes

    def decoded(self) -> None:
        """Hand in the plan that the messages suggest."""
        plan = self._decode(0)
        if plan is not None:
            self._try(plan)

    def suggest(self, plan: IntArray) -> None:
        """Hand in choices from elsewhere, repaired and polished."""
        self._try(plan)

    def _sweep(self, direction: int) -> float:
        bound = self.sweeper.sweep(direction) - self._allowance
        self.budget.charge(self.sweeper.entries)
        self._record(bound)
        return bound

    def _record(self, bound: float) -> None:
        """Keep a bound, and the multipliers that prove it, if it is the best."""
        if bound > self.bound:
            self.bound, self.best_multipliers = bound, self.multipliers

    def _decode(self, direction: int) -> IntArray | None:
        """What the sweeper decodes, counted as work."""
        self.budget.charge(self.sweeper.decoded_entries)
        return self.sweeper.decode(direction)

    def _stalled(self, history: list[float], cost: float) -> bool:
        """`cost`: of the best choices at these prices, which the bound cannot pass."""
        if len(history) < 5:
            return history[-1] >= cost
        gap = min(cost, self.cutoff) - history[-1]
        return stalled(history, gap, self.stall) if np.isfinite(gap) else stalled(history, abs(history[-1]), 1e-5)

    def priced(self, plan: IntArray) -> float:
        """Cost of choices in the Lagrangian, less what rounding may take off."""
        return self.model.linear(plan) + float(self.multipliers @ self.excess(plan)) - self.rounding

    def set_prices(self, multipliers: FloatArray) -> None:
        multipliers = self.memory.round(multipliers)
        self.sweeper.set_costs(self._base + self.memory.prices(multipliers), self.memory.rates(multipliers))
        self._count_prices(multipliers)

    def _count_prices(self, multipliers: FloatArray) -> None:
        """The sweeper's costs are those at these multipliers, rounded."""
        self.multipliers = multipliers
        self._allowance = self.memory.allowance(self.multipliers)
        self.polished = self.memory.priced(self.model, np.where(np.isfinite(self.model.slopes), self.multipliers, 0.0))

    def _try(self, plan: IntArray) -> IntArray | None:
        """Repair and polish a plan and hand it in; what it became. Rows with a slope cost their multiplier meanwhile."""
        polished = Polish(self.polished, plan, self.budget).run()
        if polished is not None:
            cost = self.model.evaluate(polished)
            self.cutoff = min(self.cutoff, self.offer(polished, cost))
            if self.plan is None or cost < self.model.evaluate(self.plan):
                self.plan = polished.copy()
        return polished

    def scale(self, value: float) -> float:
        """How large differences of bounds are, from one of them: it may be 0 far below all plans that fit."""
        return max(abs(value), self.cutoff - value) if np.isfinite(self.cutoff) else abs(value)

    def excess(self, plan: IntArray) -> FloatArray:
        """(rows,) what choices use beyond each limit."""
        return self.model.usage(plan) - self.model.limits


def stalled(history: list[float], gap: float, part: float) -> bool:
    """Whether the last four pairs of sweeps together raised the bound by no more than this part of a gap."""
    return len(history) > 4 and history[-1] - history[-5] <= part * gap
