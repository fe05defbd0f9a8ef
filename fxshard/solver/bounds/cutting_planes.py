"""Multipliers of many rows from few plans: cutting planes within reach of the best multipliers known.

Every plan x bounds the Lagrangian from above by a plane, linear(x) + lambda . excess(x). Where the least of the planes known so far
is greatest, at most a *reach* away from the best multipliers (Marsten, Hogan and Blankenship, "The boxstep method", 1975), the next
plan is looked for. Only rows that some plan exceeds can have a multiplier: of thousands of times those that bind are found by
themselves. Where message passing leaves a gap to the plan that it decodes, the plane goes through its bound instead: that is
what is to be raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fxshard.solver.primal.highs import loaded
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.model import Model

STEPS = 60
MOST_PAIRS = 40
"""Multipliers that are tried at most, and pairs of sweeps at each."""

FIRST_RISE = 0.3
LEAST_RISE = 1e-5
"""What the first reach would gain, and the predicted gain that ends the search, in parts of the bound."""

ENOUGH = 0.02
"""Sweeps end when four pairs gain less than this part of what is predicted."""

TIGHT = 1e-5
"""A plan that costs no more than this part above the bound is what message passing found; its plane goes through the plan."""

GROWS, SHRINKS = 1.5, 0.5
GROWS_BLIND = 3.0
"""What the reach is multiplied by after a step that gained what was predicted, and one that lost; while no plan that fits is known."""

BLIND_STEPS = 3
"""Multipliers that are tried while no plan that fits is known: there may be none."""

REPAIRS = 4
"""How often planes through bounds may turn out to be too low."""


@dataclass
class Plane:
    """base + lambda . excess; exact: no bound is above it. choices: the plan that it is of."""

    base: float
    excess: FloatArray
    exact: bool
    choices: IntArray

    def at(self, multipliers: FloatArray) -> float:
        return self.base + float(multipliers @ self.excess)


class Lagrangian(Protocol):
    """What the search for multipliers asks of the bound that is raised (``bounds.Ascent``)."""

    @property
    def model(self) -> Model: ...
    @property
    def multipliers(self) -> FloatArray: ...
    @property
    def bound(self) -> float: ...
    @property
    def cutoff(self) -> float: ...
    @property
    def dearest(self) -> FloatArray: ...
    @property
    def rounding(self) -> float: ...
    @property
    def done(self) -> bool: ...
    def priced(self, plan: IntArray) -> float: ...
    def excess(self, plan: IntArray) -> FloatArray: ...
    def scale(self, value: float) -> float: ...
    def evaluate(self, multipliers: FloatArray, pairs: int, enough: float) -> tuple[float, IntArray | None, float]: ...


class Bundle:
    """The planes of the plans that message passing met.

    least: predicted gain that ends the search, in parts of what bounds differ by. rise: what the first step may promise, in parts
    of the bound.
    """

    def __init__(self, ascent: Lagrangian, planes: Sequence[Plane] = (), least: float = LEAST_RISE, rise: float = FIRST_RISE) -> None:
        self.ascent, self._rise = ascent, rise
        self.planes = list(planes)
        self._least_part = least

    def run(self, plan: IntArray, steps: int = STEPS, pairs: int = MOST_PAIRS) -> None:
        """Raise the bound from where the ascent stands, whose plan is given, until the planes promise no more."""
        ascent = self.ascent
        centre, value = ascent.multipliers, ascent.bound
        self._meet(plan, value, ascent.priced(plan))
        reach = self._rise * (ascent.scale(value) + 1) / self._steepness(plan)
        repairs = 0
        for step in range(steps):
            if ascent.done or (step >= BLIND_STEPS and np.isinf(ascent.cutoff)):
                break
            found = greatest([(p.base, p.excess) for p in self.planes], centre, reach, ascent.dearest)
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
                beyond = bound < value and len(multipliers) == 1  # two plans bracket one multiplier: their own planes meet at it
                self._meet(plan_found, cost if beyond else bound, cost)
            if bound - value > (top - value) / 4:
                reach *= GROWS_BLIND if np.isinf(ascent.cutoff) else GROWS
            elif bound < value:
                reach *= SHRINKS
            if bound > value:
                centre, value = ascent.multipliers, bound

    def _least(self, value: float) -> float:
        """What is not worth another step: rounding takes as much."""
        return self._least_part * self.ascent.scale(value) + self.ascent.rounding

    def _low(self, centre: FloatArray, value: float) -> list[Plane]:
        """Planes through bounds that promise nothing beyond the best one."""
        return [p for p in self.planes if not p.exact and p.at(centre) < value + self._least(value)]

    def _raise(self, centre: FloatArray, value: float) -> bool:
        """Raise the planes that turned out to be too low; whether there were any."""
        low = self._low(centre, value)
        for plane in low:
            plane.base += value - plane.at(centre) + ENOUGH * FIRST_RISE * self.ascent.scale(value)
        return bool(low)

    def plans(self, multipliers: FloatArray, count: int) -> list[IntArray]:
        """The plans whose planes are lowest at some multipliers."""
        return [plane.choices for plane in sorted(self.planes, key=lambda plane: plane.at(multipliers))[:count]]

    def _meet(self, plan: IntArray, bound: float, cost: float) -> None:
        """Add the plane of a plan with its cost at the present multipliers, whose bound is given: through the one or the other."""
        exact, excess = cost - bound <= TIGHT * abs(cost) + self.ascent.rounding, self.ascent.excess(plan)
        base = self.ascent.model.linear(plan) if exact else bound - float(self.ascent.multipliers @ excess)
        self.planes.append(Plane(base, excess, exact, plan))

    def _steepness(self, plan: IntArray) -> float:
        """How fast the plane of a plan rises or falls most, along multipliers that may change so."""
        excess = self.ascent.excess(plan)
        return max(float(np.abs(excess[(excess > 0) | (self.ascent.multipliers > 0)]).max(initial=0.0)), 1e-9)


def greatest(
    planes: list[tuple[float, FloatArray]], centre: FloatArray, reach: float, dearest: FloatArray
) -> tuple[FloatArray, float] | None:
    """Multipliers >= 0, at most `dearest` and in all at most `reach` from the centre, where the least of planes
    (base, slopes) is greatest, and that value; None where no plane rises anywhere."""
    slopes = np.stack([slope for _, slope in planes])
    rows = np.flatnonzero((slopes > 0).any(axis=0) | (centre > 0))
    if not len(rows):
        return None
    slopes, start = slopes[:, rows], centre[rows]
    at_start = np.asarray([base for base, _ in planes]) + slopes @ start
    steep = float(np.abs(slopes).max(initial=1e-9))
    size = max(1.0, float(np.abs(at_start).max()))
    unit = size / steep  # the variables: the value, and by how many units each multiplier rises and falls
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
    lp.col_upper_ = np.concatenate([[highspy.kHighsInf], np.maximum(dearest[rows] - start, 0.0) / unit, start / unit])
    lp.row_lower_ = np.full(len(matrix), -highspy.kHighsInf)
    lp.row_upper_ = np.append(at_start / size, reach / unit)
    column, row = np.nonzero(matrix.T)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.searchsorted(column, np.arange(matrix.shape[1] + 1)).astype(np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row.astype(np.int32), matrix.T[column, row]
    highs = loaded(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = np.asarray(highs.getSolution().col_value)
    multipliers = centre.copy()
    multipliers[rows] = np.maximum(0.0, start + (values[1 : 1 + count] - values[1 + count :]) * unit)
    return multipliers, float(values[0]) * size
