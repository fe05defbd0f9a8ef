"""Presolve: exact reductions that shrink the model and preserve an optimum.

A step maps a model to a smaller one and a function that maps choices of the smaller model back to the larger. It returns the same object
where it changes nothing, and raises `Exhausted` where no allowed choice is left. A step that may take long looks at the clock as it goes,
and reduces no further once the time limit has passed: what it then returns preserves an optimum too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fxshard.solver.problem.arrays import IntArray, each
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.model import Model, Undo
from fxshard.solver.reductions.arc_consistency import ArcConsistency
from fxshard.solver.reductions.degree import EliminateSmallDegree
from fxshard.solver.reductions.dominance import Dominance
from fxshard.solver.reductions.fixed import FoldFixed
from fxshard.solver.reductions.memory import ConstantMemory, DominatedTimes
from fxshard.solver.reductions.merging import MergeDetermined
from fxshard.solver.reductions.normalise import Normalise


class Step(Protocol):
    """One reduction."""

    name: str

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The smaller model, and the map of its choices back to the larger one. Only the clock of the budget counts."""


REDUCTIONS: tuple[Step, ...] = (
    Normalise(),
    ArcConsistency(),
    ConstantMemory(),
    DominatedTimes(),
    FoldFixed(),
    MergeDetermined(),
    EliminateSmallDegree(),
    Dominance(),
)

MAX_ROUNDS = 6


def reduce(
    model: Model, steps: Sequence[Step] = REDUCTIONS, rounds: int = MAX_ROUNDS, budget: Budget = UNLIMITED
) -> tuple[Model, Undo, list[tuple[str, str]]]:
    """Apply the steps in order until a round shrinks nothing or the budget ends.

    Returns the model, the map back, and a history of (step name, size after it). No node of the returned model has a state of cost `inf`,
    which message passing requires.
    """
    undos: list[Undo] = []
    history: list[tuple[str, str]] = []
    for count in range(rounds):
        if count and budget.spent:
            break
        before = _size(model)
        for step in steps:
            size = _size(model)
            smaller, undo = step.apply(model, budget)
            if smaller is not model:
                undos.append(undo)
                if _size(smaller) != size:
                    history.append((step.name, smaller.describe()))
                model = smaller
        if _size(model) == before:
            break
    if not all(each(model.costs, lambda cost: bool(np.isfinite(cost).all()))):  # the last steps may have forbidden states
        model, undo = ArcConsistency().apply(model, budget)
        undos.append(undo)

    def undo_all(choices: IntArray) -> IntArray:
        for undo in reversed(undos):
            choices = undo(choices)
        return choices

    return model, undo_all, history


def _size(model: Model) -> tuple[int, int, int, int]:
    return len(model), len(model.edges), model.entries, len(model.limits)
