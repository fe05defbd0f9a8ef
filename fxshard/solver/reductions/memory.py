"""Reductions of rows: subtract unavoidable use from the limits, and drop rows that another row implies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import UNLIMITED, Budget
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Undo
from fxshard.solver.problem.row_uses import Use


class ConstantMemory:
    """Subtracts each use's least amount from the limits of its rows, and drops uses that become zero.

    Where the constant part alone exceeds a soft limit, its penalty moves to the constant and the limit becomes 0.
    """

    name = "take constant memory out of the limit"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model with every use zero for some state."""
        if not len(model.limits):
            if not any(model.uses):
                return model, lambda choices: choices
            return replace(model, uses=[()] * len(model)), lambda choices: choices
        taken = np.zeros(len(model.limits) + 1)
        uses = []
        for terms in model.uses:
            left = []
            for use in terms:
                least = float(use.amount.min())
                taken[use.lo] += least
                taken[use.hi] -= least
                if use.amount.max() > least:
                    left.append(Use(use.lo, use.hi, use.amount - least if least else use.amount))
            uses.append(tuple(left))
        constant = np.cumsum(taken)[:-1]
        limits = model.limits - constant
        over = (limits < 0) & np.isfinite(model.slopes)
        if not constant.any() and not over.any() and all(len(a) == len(b) for a, b in zip(uses, model.uses, strict=True)):
            return model, lambda choices: choices
        if ((limits < 0) & ~over).any():
            raise Exhausted
        paid = model.constant - float(model.slopes[over] @ limits[over])
        return replace(model, uses=uses, limits=np.where(over, 0.0, limits), constant=paid), lambda choices: choices


class DominatedTimes:
    """Drops rows that no choices can exceed, and rows whose uses are all live in another row that is at least as tight."""

    name = "drop dominated times"

    def apply(self, model: Model, budget: Budget = UNLIMITED) -> tuple[Model, Undo]:
        """The model with fewer rows."""
        if not len(model.limits):
            return model, lambda choices: choices
        keep = largest(model) > model.limits
        if not budget.late:
            _drop_implied(model, keep)
        if keep.all():
            return model, lambda choices: choices
        position = np.concatenate([[0], np.cumsum(keep)])
        uses = [_in_rows(terms, position) for terms in model.uses]
        moved = tuple(_in_rows(terms, position) for terms in model.moved)
        fewer = replace(model, limits=model.limits[keep], prices=model.prices[keep], slopes=model.slopes[keep])
        return replace(fewer, uses=uses, moved=moved), lambda choices: choices


def _in_rows(terms: tuple[Use, ...], position: IntArray) -> tuple[Use, ...]:
    """The uses in terms of the kept rows; position: (rows + 1,) the number of kept rows before each row."""
    return tuple(Use(int(lo), int(hi), u.amount) for u in terms if (lo := position[u.lo]) < (hi := position[u.hi]))


def largest(model: Model) -> FloatArray:
    """(rows,) an upper bound on the sum of each row: every use at its largest."""
    return _summed(model, np.max) + model.moving.largest(len(model.limits))


def least(model: Model) -> FloatArray:
    """(rows,) a lower bound on the sum of each row: every use at its least, and 0 for transfers."""
    return _summed(model, np.min)


def _summed(model: Model, of: Callable[[FloatArray], float]) -> FloatArray:
    """(rows,) the sum of `of(amount)` over the node uses live in each row."""
    steps = np.zeros(len(model.limits) + 1)
    for use in itertools.chain.from_iterable(model.uses):
        amount = of(use.amount)
        steps[use.lo] += amount
        steps[use.hi] -= amount
    return np.cumsum(steps)[:-1]


def _drop_implied(model: Model, keep: np.ndarray) -> None:
    """Clear `keep` for each row implied by the nearest kept row before or after it."""
    starts, ends = _ends(model)
    left: list[int] = []
    for row in np.flatnonzero(keep):
        while left and _implies(model, starts, ends, int(row), left[-1]):
            keep[left.pop()] = False
        if left and _implies(model, starts, ends, left[-1], int(row)):
            keep[row] = False
        else:
            left.append(int(row))


def _ends(model: Model) -> tuple[IntArray, IntArray]:
    """Cumulative numbers of uses that start, and that end, at or before each row."""
    starts, ends = np.zeros(len(model.limits) + 1, dtype=np.int64), np.zeros(len(model.limits) + 1, dtype=np.int64)
    for terms in (*model.uses, *model.moved):
        for use in terms:
            starts[use.lo] += 1
            ends[use.hi] += 1
    return np.cumsum(starts), np.cumsum(ends)


def _implies(model: Model, starts: IntArray, ends: IntArray, strong: int, weak: int) -> bool:
    """Whether the limit of `strong` implies that of `weak`: both hard, every use of `weak` live at `strong`, no larger limit."""
    if model.limits[strong] > model.limits[weak] or np.isfinite(model.slopes[[strong, weak]]).any():
        return False
    if strong > weak:
        return bool(ends[strong] == ends[weak])
    return bool(starts[strong] == starts[weak])
