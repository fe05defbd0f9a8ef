"""Integer costs, so that sums and bounds are exact.

float64 adds integers below 2^53 without error. Costs are multiplied by a power of two and rounded (without loss where they are integers).
The largest possible total rounding error is the margin, which the final bound subtracts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, each
from fxshard.solver.problem.model import Model
from fxshard.solver.problem.transfers import Transfers

SPAN_BITS = 45
"""The range of relevant costs is scaled to 2^45, which leaves 2^8 of headroom for sums of messages at one node."""

WORTH = 2.5e-10
"""Relative improvement below which a plan counts as no better."""


@dataclass(frozen=True)
class Scale:
    """factor: integer cost per real cost. margin: the most by which rounding raises a bound, in real cost.

    floor: the sum of the least entries of all tables, in real cost; the optimum where all costs are zero.
    """

    factor: float
    margin: float
    floor: float


def quantise(model: Model, plan_cost: float = np.inf) -> tuple[Model, Scale]:
    """An integer model with the same optimum up to `margin`; `plan_cost` (of any plan that fits) allows a finer scale.

    The penalties of rows with a slope are not integers; rounding bounds up then adds at most 2 for each such row.
    An entry that would cost more than the plan even with every other entry at its least becomes forbidden.
    """
    tables = [*model.costs, *model.edges.values(), *(t.prices for t in model.transfers)]
    count, pairs = len(model.costs), len(model.costs) + len(model.edges)
    least = each(tables[:pairs], lambda t: float(t.min(initial=np.inf))) + [0.0] * (len(tables) - pairs)
    lows = [value for value in least if np.isfinite(value)]
    floor = sum(lows) + model.constant
    room = plan_cost - floor + 1e-9 * (abs(plan_cost) + abs(floor))  # sums of floats round
    if np.isfinite(room):
        lows_of = {id(t): low for t, low in zip(tables, least, strict=True)}
        tables = each(tables, lambda t: np.where(t - lows_of[id(t)] > room, np.inf, t) if lows_of[id(t)] < np.inf else t)
    span = sum(each(tables, _spread))
    soft = int(np.isfinite(model.slopes).sum())
    exact = not soft and float(model.constant).is_integer() and all(each(tables, _whole))
    reach = room if soft and np.isfinite(room) else min(span, room)  # penalties of rows are in no table
    paid = [low for low in each(tables[pairs:], lambda t: float(t.min(initial=np.inf))) if np.isfinite(low)]
    factor = _factor(max(reach, max(map(abs, [*lows, *paid]), default=0.0), abs(floor)), exact)
    integers = each(tables, lambda t: np.rint(t * factor))
    times = [1] * pairs + [len(t.readers) for t in model.transfers]
    margin = 0.0 if exact and factor >= 1 else _error(tables, integers, times, factor) / factor
    constant = float(np.rint(model.constant * factor))
    margin += abs(constant / factor - model.constant) + 2 * soft / factor
    grain = factor if exact and factor >= 1 else max(1.0, WORTH * max(abs(floor), 0.0) * factor)
    edges = dict(zip(model.edges, integers[count:pairs], strict=True))
    transfers = Transfers(replace(t, prices=p) for t, p in zip(model.transfers, integers[pairs:], strict=True))
    scaled = replace(model, costs=integers[:count], edges=edges, transfers=transfers, constant=constant, slopes=model.slopes * factor)
    return replace(scaled, grain=float(np.floor(grain))), Scale(factor, margin, floor)


def without_costs(model: Model) -> Model:
    """The model with every finite cost 0, which keeps only its constraints."""

    def free(table: FloatArray) -> FloatArray:
        return np.where(np.isinf(table), np.inf, 0.0)

    edges = dict(zip(model.edges, each(model.edges.values(), free), strict=True))
    transfers = Transfers(replace(t, prices=free(t.prices)) for t in model.transfers)
    return replace(model, costs=each(model.costs, free), edges=edges, transfers=transfers, constant=0.0)


def _factor(magnitude: float, exact: bool) -> float:
    """The power of two that scales `magnitude` to about 2^SPAN_BITS; at most 1 for costs that are integers already."""
    if magnitude == 0.0:
        return 1.0
    exponent = SPAN_BITS - int(np.ceil(np.log2(magnitude)))
    return float(2.0 ** min(exponent, 0 if exact else 1000))


def _whole(table: FloatArray) -> bool:
    """Whether every finite entry is an integer."""
    return bool(np.all(np.isinf(table) | (table == np.rint(table))))


def _spread(table: FloatArray) -> float:
    finite = table[np.isfinite(table)]
    return float(finite.max() - finite.min()) if finite.size else 0.0


def _error(tables: list[FloatArray], integers: list[FloatArray], times: list[int], factor: float) -> float:
    """The largest total rounding error, in integer units: each table's largest error times the number of times it may be paid."""
    rounded = {id(table): integer for table, integer in zip(tables, integers, strict=True)}

    def largest(table: FloatArray) -> float:
        finite = np.isfinite(rounded[id(table)])
        return float(np.abs(rounded[id(table)][finite] - table[finite] * factor).max(initial=0.0))

    return sum(often * error for often, error in zip(times, each(tables, largest), strict=True))
