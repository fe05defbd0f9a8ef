"""Solve one connected part: bound, plan and pruning, then ever larger targets for the cost until one is met.

A *target* is a cutoff below the best plan known. Under a low target most states and pairs are pruned, neighbours can be
merged, and merging tightens the bound: either a plan below the target turns up, or it is proven that there is none,
which is a better bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .arrays import IntArray
from .bounds import Ascent
from .budget import Budget
from .elimination import eliminate, elimination_order
from .highs import solve_mip
from .infeasible import Exhausted
from .model import Model, Undo
from .pruning import prune
from .reductions import reduce
from .reductions.merging import Contract
from .scaling import sharpen

FIRST_ROUNDS = 3
SHRINKS = 0.8
"""Another round of bound and pruning is worth it while it leaves less than this part of the entries."""

TARGETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of the gap between bound and plan that are tried as targets."""

MERGE_ROUNDS = 16
MERGE_PAIRS = 100
MERGE_ENTRIES = 300_000
MOST_PAIRS = 5_000
MOST_ENTRIES = 6_000_000
"""Merged nodes have at most MERGE_PAIRS states in the first round, twice as many in each further one."""

QUICK_WORK = 200_000_000
"""Table entries of an elimination that is done at once."""

MIP_ENTRIES = 100_000
"""Beyond this many table entries HiGHS does not get anywhere."""


@dataclass(frozen=True)
class _Stage:
    """A model made from the part's own, and the way back."""

    model: Model
    undo: Undo

    def then(self, model: Model, undo: Undo | None = None) -> _Stage:
        """The next stage; `undo` leads from its choices to those of this one."""
        if undo is None:
            return _Stage(model, self.undo)
        earlier, later = self.undo, undo
        return _Stage(model, lambda choices: earlier(later(choices)))


class PartSearch:
    """The best plan and bound of one part, in the units of its model; `history` says how they came about.

    choices: None until a plan is found. bound: no plan that fits costs less; `inf` where there is none.
    """

    def __init__(self, model: Model, budget: Budget) -> None:
        self.model, self.budget = model, budget
        self.choices: IntArray | None = None
        self.value, self.bound = np.inf, -np.inf
        self.history: list[tuple[str, str]] = []

    @property
    def proven(self) -> bool:
        """Whether no better plan is left (or none at all)."""
        return self.bound >= self._cutoff()

    def run(self) -> None:
        """Search until proven, until nothing more is to be gained, or until the budget ends."""
        stage = _Stage(self.model, lambda choices: choices)
        try:
            for _ in range(FIRST_ROUNDS):
                before = stage.model.entries
                stage = self._round(stage)
                if self._over() or stage.model.entries > SHRINKS * before:
                    break
        except Exhausted:
            self._prove(self._cutoff(), "nothing cheaper is left")
        if not self._over() and not self._finish(stage, QUICK_WORK, MIP_ENTRIES if len(stage.model.limits) > 1 else 0):
            self._deepen(stage)

    def _deepen(self, stage: _Stage) -> None:
        """Try targets from the bound up to the plan at hand."""
        for part in TARGETS:
            if self._over():
                return
            top = self.value if np.isfinite(self.value) else self.bound + max(1.0, abs(self.bound))
            target = min(self._cutoff(), float(np.ceil(self.bound + part * (top - self.bound))))
            if part == TARGETS[-1]:
                target = self._cutoff()
            unit = stage.model.unit
            try:
                self._merge_rounds(stage.then(replace(stage.model, cutoff=(target - 1) * unit + 1)), target)
            except Exhausted:
                self._prove(min(target, self._cutoff()), "nothing below the target is left")

    def _merge_rounds(self, stage: _Stage, target: float) -> None:
        """Merge, bound and prune in turn; raises `Exhausted` when nothing is left below the target."""
        pairs = MERGE_PAIRS
        for _ in range(MERGE_ROUNDS):
            entries = min(MOST_ENTRIES, max(MERGE_ENTRIES, stage.model.entries * 3 // 2))
            model, undo = Contract(pairs, entries).apply(stage.model)
            before = model.entries, self.bound
            stage = self._round(self._reduce(stage.then(model, undo)), target)
            if self._over() or self._finish(stage, QUICK_WORK, 0, target):
                return
            if pairs >= MOST_PAIRS and stage.model.entries > SHRINKS * before[0] and self.bound == before[1]:
                break
            pairs = min(MOST_PAIRS, 2 * pairs)
        self._finish(stage, np.inf, MIP_ENTRIES, target)

    def _round(self, stage: _Stage, target: float = np.inf) -> _Stage:
        """Raise the bound, look for plans, and forbid what is in no plan below the cutoff."""
        model = self._lower_cutoff(stage.model)
        if not len(model):
            self._offer(stage, np.zeros(0, dtype=np.int64), model.constant)
            raise Exhausted
        stage = stage.then(sharpen(model))
        ascent = Ascent(stage.model, self.budget, lambda choices, cost: self._offer(stage, choices, cost))
        ascent.run()
        self._prove(min(ascent.bound / stage.model.unit, target), "message passing")
        cutoff = min(stage.model.cutoff, ascent.cutoff)
        if ascent.bound >= cutoff:
            raise Exhausted
        if self._over() or np.isinf(cutoff):
            return stage
        ascent.model = replace(stage.model, cutoff=cutoff)
        return self._reduce(stage.then(prune(ascent)))

    def _reduce(self, stage: _Stage) -> _Stage:
        smaller, undo, _ = reduce(stage.model, rounds=2)
        return stage.then(smaller, undo)

    def _finish(self, stage: _Stage, work: float, mip_entries: int, target: float = np.inf) -> bool:
        """Search what is left exactly if that is small enough; whether it was."""
        model = self._lower_cutoff(stage.model)
        if not len(model.limits) and (order := elimination_order(model, max_work=work)) is not None:
            choices = eliminate(model, order, self.budget)
            if choices is not None:
                self._offer(stage, choices, model.evaluate(choices))
            if not self.budget.spent:
                self._prove(min(target, self._cutoff()), "variable elimination")
            return True
        if model.entries > mip_entries:
            return False
        answer = solve_mip(model, self.budget)
        if answer.choices is not None and model.fits(answer.choices):
            self._offer(stage, answer.choices, model.evaluate(answer.choices))
        self._prove(min(answer.bound / model.unit, target), "HiGHS")
        return True

    def _over(self) -> bool:
        return self.proven or self.budget.spent

    def _cutoff(self) -> float:
        """Costs from here on are no better than the plan at hand."""
        return self.value - self.model.grain + 1 if np.isfinite(self.value) else np.inf

    def _lower_cutoff(self, model: Model) -> Model:
        return replace(model, cutoff=min(model.cutoff, (self._cutoff() - 1) * model.unit + 1))

    def _offer(self, stage: _Stage, choices: IntArray, cost: float) -> float:
        """Keep a plan of a stage's model if it is better; the cutoff in the units of that model."""
        if cost < self.value * stage.model.unit:
            plan = stage.undo(choices)
            value = self.model.evaluate(plan)
            if value < self.value and self.model.fits(plan):
                self.choices, self.value = plan, value
        return (self._cutoff() - 1) * stage.model.unit + 1

    def _prove(self, bound: float, name: str) -> None:
        """Record a bound, rounded up to an integer as costs are; it stops at the plan's cost."""
        bound = min(float(np.ceil(bound)) if np.isfinite(bound) else bound, self._cutoff())
        if bound > self.bound:
            self.bound = bound
        self.history.append((name, f"bound {self.bound:.0f}, plan {self.value:.0f}, of {len(self.model)} nodes"))
