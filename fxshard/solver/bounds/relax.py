"""Message passing on a model with transfers, then conversion of what pruning leaves to a model without transfers (`write_out`).

Message passing handles transfers directly, by layouts instead of states, and its relaxation is tight where few constraints bind. Most
often the bound meets a plan at once. Otherwise pruning leaves few states, and the joint choices of a value's source and readers fit in
the states of one node.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

from fxshard.solver.bounds.bounds import Ascent
from fxshard.solver.bounds.merged_links import Merging
from fxshard.solver.bounds.pruning import Slacks, find_slacks
from fxshard.solver.bounds.write_out import write_out
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model, Undo
from fxshard.solver.reductions import reduce
from fxshard.solver.reductions.arc_consistency import ArcConsistency
from fxshard.solver.reductions.memory import ConstantMemory, DominatedTimes

PATIENCE = 0.001
"""Sweeps continue while four pairs raise the bound by this fraction of the gap: they are cheap compared with the search that follows."""

SPLITTING = 20
"""Pairs of sweeps that split shared prices between readers, at known multipliers, before links are merged."""


class Relaxation:
    """Message passing on a model with transfers.

    choices, value: the best plan known, and its cost. cutoff: only cheaper plans are better. bound: the proven lower bound.
    undo: maps choices of the presolved model, `ascent.model`, to choices of `model`. tight: the ascent of the highest bounds, see `merge`.
    """

    def __init__(self, model: Model, choices: IntArray | None, budget: Budget) -> None:
        self.model, self.choices = model, choices
        self.value = np.inf if choices is None else model.evaluate(choices)
        self.bound = -np.inf
        smaller, self.undo, _ = reduce(model, (ArcConsistency(), ConstantMemory(), DominatedTimes()), 1, budget)
        self.ascent = Ascent(replace(smaller, cutoff=self.cutoff), budget, lambda choices, _: self.take(choices), PATIENCE)
        self.tight = self.ascent

    def from_state(
        self, state: tuple[FloatArray, ...], model: Model, inner: Model, choices: IntArray | None, gap: float, budget: Budget
    ) -> Relaxation:
        """A relaxation of a narrower model that continues from a saved state of the sweeper, which both share: use only one of them.

        inner: the presolved form of the narrower model, with the same numbers of states. choices: a plan of `model`, if one is known.
        gap: the relative improvement below which a plan counts as no better.
        """
        other = copy(self)
        value = np.inf if choices is None else model.evaluate(choices)
        other.choices, other.value, other.bound = choices, value, -np.inf
        worth = float(np.floor(gap * abs(value))) if np.isfinite(value) else 0.0
        other.model = replace(model, grain=max(model.grain, worth))
        self.ascent.sweeper.restore(state)
        self.ascent.sweeper.allow(np.isfinite(np.concatenate(inner.costs)))
        inner = replace(inner, grain=other.model.grain)
        other.ascent = self.ascent.narrowed(inner, other.cutoff, budget, lambda choices, _: other.take(choices))
        other.tight = other.ascent
        return other

    @property
    def cutoff(self) -> float:
        """The cost below which a plan is better than the best known."""
        return self.value - self.model.grain + 1 if np.isfinite(self.value) else np.inf

    def begin(self, pairs: int) -> None:
        """Sweep `pairs` times in both directions and decode a plan; records no bound."""
        for _ in range(pairs):
            self.ascent.pair()
            if self.ascent.done:
                return
        self.ascent.offer_decoded()

    def run(self, budget: Budget | None = None) -> None:
        """Raise the bound and collect plans, unless the bound has reached the cutoff. budget: by default all that is left."""
        whole = self.ascent.budget
        self.ascent.budget = whole if budget is None else budget
        if self.ascent.bound < self.ascent.cutoff:
            self._raise_bound()
        self.prove(self.ascent.bound)
        self.ascent.budget = self.tight.budget = whole

    def _raise_bound(self) -> None:
        """Message passing; where there are limits, on separate links until the splits of prices are good, and then on merged ones.

        Good splits follow the multipliers. Where these are known, from a tied model or an earlier solve, few sweeps find the splits;
        otherwise the search for multipliers on separate links does. Without limits, pruning leaves so little that branch and bound gains
        nothing from higher bounds.
        """
        ascent = self.tight = self.ascent
        if not len(ascent.model.limits) or not self._mergeable:
            ascent.run()
            return
        if ascent.multipliers.any():
            ascent.settle(SPLITTING)
        else:
            ascent.run()
        self.prove(ascent.bound)
        if not ascent.done:
            self.merge().run()
            ascent.adopt(self.tight)

    @property
    def _mergeable(self) -> bool:
        return self._merging.worthwhile(int(self.ascent.sweeper.splits.own[-1]))

    @cached_property
    def _merging(self) -> Merging:
        return Merging.of(self.ascent.sweeper.wiring)

    def merge(self) -> Ascent:
        """Merge the links at the current messages and multipliers; returns the ascent with merged links, `tight` from now on.

        Where that is not worth it, it is `ascent` itself.
        """
        self.tight = self.ascent.merged(self._merging) if self._mergeable else self.ascent
        return self.tight

    def below(self, target: float) -> tuple[Model, Undo]:
        """The model pruned to plans that cost less than `target`, without transfers; raises `Exhausted` where there are none."""
        left, undo = self.written(find_slacks(self.tight, target), target)
        return left, lambda choices: self.undo(undo(choices))

    def written(self, slacks: Slacks, target: float) -> tuple[Model, Undo]:
        """As `below`, by known slacks of `tight` for the target; choices are mapped to those of `ascent.model`."""
        left, undo = write_out(self.ascent.model, slacks, self.tight.sweeper)
        return replace(left, prices=self.tight.multipliers, cutoff=target), undo

    def take(self, choices: IntArray) -> float:
        """Offer a plan of `ascent.model`; returns the new cutoff."""
        return self.offer(self.undo(choices))

    def offer(self, choices: IntArray) -> float:
        """Keep a plan of `model` if it fits and is better; returns the new cutoff."""
        cost = self.model.evaluate(choices)
        if cost < self.value and self.model.fits(choices):
            self.choices, self.value = choices.copy(), cost
            self.ascent.cutoff = min(self.ascent.cutoff, self.cutoff)
            self.tight.cutoff = min(self.tight.cutoff, self.cutoff)
        return self.cutoff

    def prove(self, bound: float) -> None:
        """Record a bound, capped at the cutoff."""
        self.bound = max(self.bound, min(bound, self.cutoff))
