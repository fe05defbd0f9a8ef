"""Lagrange multipliers of many rows by cutting planes in a trust region.

Every plan x gives a cutting plane, linear(x) + lambda . excess(x), an upper bound on the dual function. A linear program maximises the
least of the known planes within a distance, the *reach*, of the best multipliers (Marsten, Hogan and Blankenship, "The boxstep method",
1975); message passing at its solution gives the next plan. Only rows that some plan exceeds get multipliers, so that the few binding ones
among thousands are found. Where message passing leaves a gap between its bound and the decoded plan, the plane is put through the bound
instead, since the bound is the function being maximised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fxshard.solver.primal.highs import loaded
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

STEPS = 60
MOST_PAIRS = 40
"""The most multipliers tried, and pairs of sweeps at each."""

FIRST_RISE = 0.3
LEAST_RISE = 1e-5
"""Predicted gain of the first step, and the predicted gain below which the search ends, as fractions of the bound."""

ENOUGH = 0.02
"""Sweeps end when four pairs gain less than this fraction of the predicted gain."""

TIGHT = 1e-5
"""Relative gap between plan and bound up to which the plane goes through the plan, not the bound."""

GROWS, SHRINKS = 1.5, 0.5
GROWS_BLIND = 3.0
"""Factors of the reach: after a step that gains a quarter of its prediction, after a loss, and after a gain while no plan known fits."""

BLIND_STEPS = 3
"""Multipliers tried while no plan that fits is known; there may be none."""

REPAIRS = 4
"""The most times that planes through bounds are raised because they proved too low."""


@dataclass
class Plane:
    """The function base + lambda . excess. exact: whether it is a proven upper bound. choices: its plan."""

    base: float
    excess: FloatArray
    exact: bool
    choices: IntArray

    def at(self, multipliers: FloatArray) -> float:
        return self.base + float(multipliers @ self.excess)


class Lagrangian(Protocol):
    """The part of `bounds.Ascent` that the search for multipliers uses."""

    @property
    def model(self) -> Model: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def multipliers(self) -> FloatArray: ...
    @property
    def bound(self) -> float: ...
    @property
    def cutoff(self) -> float: ...
    @property
    def max_multipliers(self) -> FloatArray: ...
    @property
    def rounding(self) -> float: ...
    @property
    def done(self) -> bool: ...
    def priced(self, plan: IntArray) -> float: ...
    def excess(self, plan: IntArray) -> FloatArray: ...
    def scale(self, value: float) -> float: ...
    def evaluate(self, multipliers: FloatArray, pairs: int, enough: float) -> tuple[float, IntArray | None, float]: ...


class Bundle:
    """The cutting planes of the plans found by message passing.

    least: predicted gain below which the search ends; rise: predicted gain of the first step. Both are fractions of `ascent.scale`.
    """

    def __init__(self, ascent: Lagrangian, planes: Sequence[Plane] = (), least: float = LEAST_RISE, rise: float = FIRST_RISE) -> None:
        self.ascent, self._rise = ascent, rise
        self.planes = list(planes)
        self._least_part = least

    def exactly(self, ascent: Lagrangian) -> Bundle:
        """The exact planes, for another ascent on the same model: the others are bounds by the messages of this one."""
        return Bundle(ascent, [plane for plane in self.planes if plane.exact], self._least_part, self._rise)

    def run(self, plan: IntArray, steps: int = STEPS, pairs: int = MOST_PAIRS) -> None:
        """Raise the bound from the ascent's current multipliers until the planes predict no further gain; plan: decoded there."""
        ascent = self.ascent
        centre, value = ascent.multipliers, ascent.bound
        self._add_plane(plan, value, ascent.priced(plan))
        reach = self._rise * (ascent.scale(value) + 1) / self._steepness(plan)
        repairs = 0
        for step in range(steps):
            if ascent.done or (step >= BLIND_STEPS and np.isinf(ascent.cutoff)):
                break
            found = greatest([(p.base, p.excess) for p in self.planes], centre, reach, ascent.max_multipliers, ascent.budget.seconds_left)
            if found is None:
                break
            multipliers, top = found
            if top - value <= self._least(value):
                if repairs == REPAIRS or not self._raise(centre, value):
                    break
                repairs += 1
                continue
            bound, plan_found, cost = ascent.evaluate(multipliers, pairs, ENOUGH * (top - value))
            if plan_found is not None:
                # with a single row, the exact planes of two plans meet at the best multiplier
                beyond = bound < value and len(multipliers) == 1
                self._add_plane(plan_found, cost if beyond else bound, cost)
            if bound - value > (top - value) / 4:
                reach *= GROWS_BLIND if np.isinf(ascent.cutoff) else GROWS
            elif bound < value:
                reach *= SHRINKS
            if bound > value:
                centre, value = ascent.multipliers, bound

    def _least(self, value: float) -> float:
        """The predicted gain that is not worth another step, rounding included."""
        return self._least_part * self.ascent.scale(value) + self.ascent.rounding

    def _low(self, centre: FloatArray, value: float) -> list[Plane]:
        """Inexact planes that predict no gain over the best bound at the best multipliers."""
        return [p for p in self.planes if not p.exact and p.at(centre) < value + self._least(value)]

    def _raise(self, centre: FloatArray, value: float) -> bool:
        """Raise the planes that proved too low; whether there were any."""
        low = self._low(centre, value)
        for plane in low:
            plane.base += value - plane.at(centre) + ENOUGH * FIRST_RISE * self.ascent.scale(value)
        return bool(low)

    def plans(self, multipliers: FloatArray, count: int) -> list[IntArray]:
        """The different plans of the lowest planes at these multipliers, at most `count`."""
        lowest = sorted(self.planes, key=lambda plane: plane.at(multipliers))
        return list({plane.choices.tobytes(): plane.choices for plane in lowest}.values())[:count]

    def _add_plane(self, plan: IntArray, bound: float, cost: float) -> None:
        """Add the plane of a plan, through its cost at the current multipliers if that is close to the bound, else through the bound."""
        exact, excess = cost - bound <= TIGHT * abs(cost) + self.ascent.rounding, self.ascent.excess(plan)
        base = self.ascent.model.linear(plan) if exact else bound - float(self.ascent.multipliers @ excess)
        self.planes.append(Plane(base, excess, exact, plan))

    def _steepness(self, plan: IntArray) -> float:
        """The steepest slope of a plan's plane over the multipliers that can change in that direction."""
        excess = self.ascent.excess(plan)
        return max(float(np.abs(excess[(excess > 0) | (self.ascent.multipliers > 0)]).max(initial=0.0)), 1e-9)


def greatest(
    planes: list[tuple[float, FloatArray]], centre: FloatArray, reach: float, max_multipliers: FloatArray, seconds: float | None = None
) -> tuple[FloatArray, float] | None:
    """The multipliers that maximise the least of the planes (base, slopes), and that value; None where no plane can rise.

    The multipliers lie between 0 and `max_multipliers`, within an L1 distance `reach` of the centre. seconds: None is also returned
    where the search takes longer.
    """
    slopes = np.stack([slope for _, slope in planes])
    rows = np.flatnonzero((slopes > 0).any(axis=0) | (centre > 0))
    if not len(rows):
        return None
    slopes, start = slopes[:, rows], centre[rows]
    at_start = np.asarray([base for base, _ in planes]) + slopes @ start
    steep = float(np.abs(slopes).max(initial=1e-9))
    size = max(1.0, float(np.abs(at_start).max()))
    unit = size / steep  # variables: the value, then each multiplier's rise and its fall in these units
    count = len(rows)
    matrix = np.zeros((len(planes) + 1, 1 + 2 * count))
    matrix[:-1, 0] = 1.0
    matrix[:-1, 1 : 1 + count], matrix[:-1, 1 + count :] = -slopes / steep, slopes / steep
    matrix[-1, 1:] = 1.0
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = matrix.shape[1], matrix.shape[0]
    lp.col_cost_ = np.append(-1.0, np.zeros(2 * count))
    lp.col_lower_ = np.append(-highspy.kHighsInf, np.zeros(2 * count))
    lp.col_upper_ = np.concatenate([[highspy.kHighsInf], np.maximum(max_multipliers[rows] - start, 0.0) / unit, start / unit])
    lp.row_lower_ = np.full(len(matrix), -highspy.kHighsInf)
    lp.row_upper_ = np.append(at_start / size, reach / unit)
    column, row = np.nonzero(matrix.T)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(column, np.arange(matrix.shape[1] + 1)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row.astype(np.int32), matrix.T[column, row]
    highs = loaded(lp)
    highs.setOptionValue("presolve", "off")  # with thousands of multipliers and few planes, presolve is slower than the simplex method
    if seconds is not None:
        highs.setOptionValue("time_limit", seconds)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = np.asarray(highs.getSolution().col_value)
    multipliers = centre.copy()
    multipliers[rows] = np.maximum(0.0, start + (values[1 : 1 + count] - values[1 + count :]) * unit)
    return multipliers, float(values[0]) * size
