"""Solve one connected component: bounding and pruning, then HiGHS on what is left, whole if it is small, else in growing portions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.pruning import portion, prune
from fxshard.solver.primal.highs import Answer, solve_mip, too_large
from fxshard.solver.primal.neighbourhood import freed, neighbourhoods
from fxshard.solver.problem.arrays import IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Undo
from fxshard.solver.reductions import reduce

FIRST_ROUNDS = 3
SHRINKS = 0.8
"""Rounds of bounding and pruning continue while each leaves at most this fraction of the entries."""

MIP_ENTRIES = 100_000
"""The most table entries of a model given to HiGHS whole; on larger ones it makes no progress."""

FIRST_PORTION = 25_000
PORTION_GROWTH = 1.6
"""Pairs in the first portion given to HiGHS, and the growth factor of each further one."""

NEIGHBOURHOOD_ENTRIES = 5_000
NEIGHBOURHOOD_WORK = 500_000_000
SEARCH_WORK = 100_000_000
FREEING_WORK = 1_000_000
"""Large neighbourhood search: entries of the first neighbourhood; work of all before the first portion; most and least work of one."""


@dataclass(frozen=True)
class _Stage:
    """A model derived from the component's, and the map of its choices back."""

    model: Model
    undo: Undo

    def then(self, model: Model, undo: Undo | None = None) -> _Stage:
        """The next stage; undo: maps its choices to those of this one (None: unchanged)."""
        if undo is None:
            return _Stage(model, self.undo)
        earlier, later = self.undo, undo
        return _Stage(model, lambda choices: earlier(later(choices)))


class ComponentSearch:
    """Search of one component. history: the steps and their results.

    choices: the best plan, None until one is found. bound: a lower bound on plans that fit; `inf` where there is none. grows: continue
    until proven or the budget ends.
    """

    def __init__(self, model: Model, budget: Budget, *, grows: bool = False) -> None:
        self.model, self.budget, self._grows = model, budget, grows
        self._rng = np.random.default_rng(0)
        self.choices: IntArray | None = None
        self.value, self.bound = np.inf, -np.inf
        self.history: list[tuple[str, str]] = []

    @property
    def proven(self) -> bool:
        """Whether the bound proves that no better plan exists."""
        return self.bound >= self._cutoff()

    def run(self) -> None:
        """Search until proven, until all methods are exhausted, or until the budget ends."""
        if self.budget.late:
            return
        stage = _Stage(self.model, lambda choices: choices)
        try:
            for _ in range(FIRST_ROUNDS):
                before = stage.model.entries
                stage = self._round(stage)
                if self._over() or stage.model.entries > SHRINKS * before:
                    break
        except Exhausted:
            self._prove(self._cutoff(), "nothing cheaper is left")
        if not self._over() and not self._finish(stage) and self._grows:
            self._grow()

    def _grow(self) -> None:
        """Search the pairs of least slack exactly with HiGHS, in growing portions, until a portion contains every remaining pair."""
        pairs, reach, work = FIRST_PORTION, 1.0, NEIGHBOURHOOD_WORK
        while not self._over():
            self._search_neighbourhoods(self.budget.part(work))
            if self._over():
                return
            work *= 2
            stage, ascent = self._last
            model = self._lower_cutoff(stage.model)
            top = model.cutoff if np.isfinite(model.cutoff) else ascent.bound + reach * max(1.0, abs(ascent.bound))
            target, answer = top, Answer(None, np.inf)
            try:
                left, target = portion(ascent, top, pairs)
                part = self._reduce(stage.then(replace(left, cutoff=model.cutoff)))
                if self.budget.late:
                    return
                if too_large(part.model, self.budget):
                    self.budget.end()
                    return
                answer = solve_mip(part.model, self.budget)
                if answer.choices is not None and part.model.fits(answer.choices):
                    self._offer(part, answer.choices, part.model.evaluate(answer.choices))
            except Exhausted:
                pass
            self._prove(min(answer.bound, target), f"HiGHS on {pairs} pairs")
            if target >= model.cutoff:
                return
            pairs, reach = int(np.ceil(pairs * PORTION_GROWTH)), 2 * reach

    def _search_neighbourhoods(self, budget: Budget) -> None:
        """Large neighbourhood search; a neighbourhood is larger after one that was searched completely, smaller after one that was not."""
        entries = NEIGHBOURHOOD_ENTRIES
        while self.choices is not None and not (budget.spent or self._over()):
            free = sorted(neighbourhoods(self.model, self.choices, self._rng, entries))
            budget.charge(self.model.entries / 10 + FREEING_WORK)
            nodes = np.asarray(free, dtype=np.int64)
            proven = self._search_neighbourhood(nodes, budget)
            entries = int(entries * (1.1 if proven else 0.7)) + 1
            if len(free) == len(self.model):
                return

    def _search_neighbourhood(self, nodes: IntArray, budget: Budget) -> bool:
        """Search the choices of some nodes with all others fixed; whether the search was complete."""
        assert self.choices is not None
        try:
            model, undo, _ = reduce(freed(self.model, self.choices, nodes), budget=budget)
        except Exhausted:
            return True
        part = ComponentSearch(replace(model, constant=0.0), budget.part(SEARCH_WORK))
        part.value = self.value - model.constant
        part.run()
        if part.choices is not None:
            choices = self.choices.copy()
            choices[nodes] = undo(part.choices)
            self._offer(_Stage(self.model, lambda found: found), choices, self.model.evaluate(choices))
        return part.proven

    def _round(self, stage: _Stage) -> _Stage:
        """Raise the bound, collect plans, and prune what is in no plan below the cutoff."""
        model = self._lower_cutoff(stage.model)
        if not len(model):
            self._offer(stage, np.zeros(0, dtype=np.int64), model.constant)
            raise Exhausted
        stage = stage.then(model)
        ascent = Ascent(stage.model, self.budget, lambda choices, cost: self._offer(stage, choices, cost))
        ascent.run()
        self._prove(ascent.bound, "message passing")
        self._last = stage, ascent
        cutoff = min(stage.model.cutoff, ascent.cutoff)
        if ascent.bound >= cutoff:
            raise Exhausted
        if self._over() or np.isinf(cutoff):
            return stage
        ascent.model = replace(stage.model, cutoff=cutoff)
        return self._reduce(stage.then(prune(ascent)))

    def _reduce(self, stage: _Stage) -> _Stage:
        smaller, undo, _ = reduce(stage.model, rounds=2, budget=self.budget)
        return stage.then(smaller, undo)

    def _finish(self, stage: _Stage) -> bool:
        """Solve the stage's model exactly if it is small enough; whether it was."""
        model = self._lower_cutoff(stage.model)
        if model.entries > MIP_ENTRIES:
            return False
        answer = solve_mip(model, self.budget)
        if answer.choices is not None and model.fits(answer.choices):
            self._offer(stage, answer.choices, model.evaluate(answer.choices))
        self._prove(answer.bound, "HiGHS")
        return True

    def _over(self) -> bool:
        return self.proven or self.budget.spent

    def _cutoff(self) -> float:
        """The cost below which a plan is better than the best known."""
        return self.value - self.model.grain + 1 if np.isfinite(self.value) else np.inf

    def _lower_cutoff(self, model: Model) -> Model:
        return replace(model, cutoff=min(model.cutoff, self._cutoff()))

    def _offer(self, stage: _Stage, choices: IntArray, cost: float) -> float:
        """Keep a plan of a stage's model if it is better; the cutoff that then holds."""
        if cost < self.value:
            plan = stage.undo(choices)
            value = self.model.evaluate(plan)
            if value < self.value and self.model.fits(plan):
                self.choices, self.value = plan, value
        return self._cutoff()

    def _prove(self, bound: float, name: str) -> None:
        """Record a bound, rounded up since costs are integers, and capped at the cutoff."""
        bound = min(float(np.ceil(bound)) if np.isfinite(bound) else bound, self._cutoff())
        if bound > self.bound:
            self.bound = bound
        self.history.append((name, f"bound {self.bound:.0f}, plan {self.value:.0f}, of {len(self.model)} nodes"))
