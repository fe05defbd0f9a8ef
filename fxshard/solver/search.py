"""Solve one connected part: rounds of bound, plan and pruning, then exact search on what they leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .bounds import Ascent
from .budget import Budget
from .elimination import eliminate, elimination_order
from .highs import solve_mip
from .infeasible import Exhausted
from .model import Model, Undo
from .problem import IntArray
from .pruning import prune
from .reductions import reduce
from .scaling import sharpen

MAX_ROUNDS = 8
SHRINKS = 0.9
"""Another round is worth it while pruning leaves less than this part of the entries."""

MIP_ENTRIES = 400_000
"""Beyond this many table entries HiGHS does not get anywhere."""


class PartSearch:
    """The best plan and bound of one part, in the units of its model; `history` says how they came about.

    choices: None until a plan is found. bound: no plan that fits costs less; `inf` where there is none.
    """

    def __init__(self, model: Model, budget: Budget) -> None:
        self.model, self.budget = model, budget
        self.choices: IntArray | None = None
        self.value, self.bound = np.inf, -np.inf
        self.history: list[tuple[str, str]] = []
        self._undo: Undo = lambda choices: choices
        self._unit = 1.0

    @property
    def proven(self) -> bool:
        """Whether no better plan is left (or none at all)."""
        return self.bound >= self._cutoff()

    def run(self) -> None:
        """Search until proven or the budget ends."""
        model = self.model
        try:
            for _ in range(MAX_ROUNDS):
                before = model.entries
                model = self._round(model)
                if self.proven or self.budget.spent or model.entries > SHRINKS * before:
                    break
            if not self.proven and not self.budget.spent:
                self._exact(model)
        except Exhausted:
            self._prove(np.inf, "nothing cheaper is left")

    def _round(self, model: Model) -> Model:
        """Raise the bound, look for plans, and give back the model without what they rule out."""
        model = sharpen(replace(model, cutoff=self._cutoff() if model.unit == 1 else model.cutoff))
        self._unit = model.unit
        ascent = Ascent(model, self.budget, self._offer)
        ascent.run()
        self._prove(ascent.bound / model.unit, "message passing")
        if self.proven or self.budget.spent or np.isinf(ascent.cutoff):
            return model
        ascent.model = replace(model, cutoff=ascent.cutoff)
        smaller, undo, _ = reduce(prune(ascent))
        self._chain(undo)
        self.history.append(("prune by reduced cost", smaller.describe()))
        return smaller

    def _exact(self, model: Model) -> None:
        if not len(model.limits) and (order := elimination_order(model)) is not None:
            choices = eliminate(model, order, self.budget)
            if choices is not None:
                self._offer(choices, model.evaluate(choices))
            if not self.budget.spent:
                self._prove(np.inf, "variable elimination")
        elif model.entries <= MIP_ENTRIES:
            answer = solve_mip(model, self.budget)
            if answer.choices is not None and model.fits(answer.choices):
                self._offer(answer.choices, model.evaluate(answer.choices))
            self._prove(answer.bound / model.unit, "HiGHS")

    def _cutoff(self) -> float:
        """Costs from here on are no better than the plan at hand."""
        return self.value - self.model.grain + 1 if np.isfinite(self.value) else np.inf

    def _offer(self, choices: IntArray, cost: float) -> float:
        """Keep a plan of the present model if it is better; the cutoff in the units of that model."""
        if cost < self.value * self._unit:
            plan = self._undo(choices)
            value = self.model.evaluate(plan)
            if value < self.value and self.model.fits(plan):
                self.choices, self.value = plan, value
        return (self._cutoff() - 1) * self._unit + 1

    def _chain(self, undo: Undo) -> None:
        earlier = self._undo
        self._undo = lambda choices: earlier(undo(choices))

    def _prove(self, bound: float, name: str) -> None:
        """Record a bound, rounded up to an integer as costs are; it stops at the plan's cost."""
        bound = min(float(np.ceil(bound)) if np.isfinite(bound) else bound, self._cutoff())
        if bound > self.bound:
            self.bound = bound
        self.history.append((name, f"bound {self.bound:.0f}, plan {self.value:.0f}, of {len(self.model)} nodes"))
