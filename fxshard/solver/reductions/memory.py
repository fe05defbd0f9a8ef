"""Rows: what is used whatever is chosen leaves the limit; rows that another row implies are dropped."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.infeasible import Exhausted
from fxshard.solver.problem.model import Model, Undo
from fxshard.solver.problem.row_uses import Use


class ConstantMemory:
    """Each use's least amount is subtracted from the limits of its rows; uses that leave nothing are dropped.

    What exceeds a limit that may be exceeded even then is paid for.
    """

    name = "take constant memory out of the limit"

    def apply(self, model: Model) -> tuple[Model, Undo]:
        """The model in which every use is zero for some state."""
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
    """Drop the rows that cannot overflow and those whose uses all continue into a row that is as tight."""

    name = "drop dominated times"

    def apply(self, model: Model) -> tuple[Model, Undo]:
        """The model with fewer memory rows."""
        if not len(model.limits):
            return model, lambda choices: choices
        keep = largest(model) > model.limits
        _drop_implied(model, keep)
        if keep.all():
            return model, lambda choices: choices
        position = np.concatenate([[0], np.cumsum(keep)])
        uses = [_in_rows(terms, position) for terms in model.uses]
        moved = tuple(_in_rows(terms, position) for terms in model.moved)
        fewer = replace(model, limits=model.limits[keep], prices=model.prices[keep], slopes=model.slopes[keep])
        return replace(fewer, uses=uses, moved=moved), lambda choices: choices


def _in_rows(terms: tuple[Use, ...], position: IntArray) -> tuple[Use, ...]:
    """Uses in the rows that are left; `position` (rows + 1,) says how many are left before each."""
    return tuple(Use(int(lo), int(hi), u.amount) for u in terms if (lo := position[u.lo]) < (hi := position[u.hi]))


def largest(model: Model) -> FloatArray:
    """The sum of each row were every use at its largest."""
    return _summed(model, np.max) + model.moving.largest(len(model.limits))


def least(model: Model) -> FloatArray:
    """The sum of each row were every use at its least; transfers may all use nothing."""
    return _summed(model, np.min)


def _summed(model: Model, of: Callable[[FloatArray], float]) -> FloatArray:
    """(rows,) one number of every use of the nodes, added up while it lasts."""
    steps = np.zeros(len(model.limits) + 1)
    for use in itertools.chain.from_iterable(model.uses):
        amount = of(use.amount)
        steps[use.lo] += amount
        steps[use.hi] -= amount
    return np.cumsum(steps)[:-1]


def _drop_implied(model: Model, keep: np.ndarray) -> None:
    """Unset rows whose uses are all live in the nearest kept row before or after, where the limit is no larger and may not be exceeded."""
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
    """Number of uses that start at or before each row, and that end at or before it."""
    starts, ends = np.zeros(len(model.limits) + 1, dtype=np.int64), np.zeros(len(model.limits) + 1, dtype=np.int64)
    for terms in (*model.uses, *model.moved):
        for use in terms:
            starts[use.lo] += 1
            ends[use.hi] += 1
    return np.cumsum(starts), np.cumsum(ends)


def _implies(model: Model, starts: IntArray, ends: IntArray, strong: int, weak: int) -> bool:
    """Whether every use live at `weak` is live at `strong`, and `strong` allows no more."""
    if model.limits[strong] > model.limits[weak] or np.isfinite(model.slopes[[strong, weak]]).any():
        return False
    if strong > weak:
        return bool(ends[strong] == ends[weak])
    return bool(starts[strong] == starts[weak])
