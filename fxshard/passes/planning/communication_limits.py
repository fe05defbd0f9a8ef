"""Limits on the bytes sent along a mesh axis: rows of the problem, and a check of the finished plan.

Each redistribution counts with the bytes of its cheapest path: a limit affects which layouts are chosen, never which path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fxshard.errors import PlanError
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import AnyShape, Price, path_bytes
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.prices import Prices
from fxshard.plans.constraints import Communication
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.solver import Row
from fxshard.solver.problem.rows import TOLERANCE


@dataclass(frozen=True)
class SentTensor:
    """A tensor (global ``shape``, or several shapes; ``itemsize``) that is redistributed: by transfer ``transfer``, between any two of
    ``layouts``; or within state ``state`` of variable ``var``, from the first layout to the second. A layout of None (no value, or no
    reader) sends nothing."""

    shape: AnyShape
    itemsize: int
    layouts: tuple[Layout | None, ...]
    transfer: int = -1
    var: int = -1
    state: int = -1


def limit_rows(
    limits: Sequence[Communication],
    mesh: Mesh,
    price: Price,
    moved: Sequence[SentTensor],
    own: Sequence[Mapping[int, np.ndarray]],
    states: Sequence[int],
) -> tuple[Row, ...]:
    """One row per limit, in bytes per rank; ``own``: per limit, variable -> bytes that the collectives of its nodes send in each state;
    ``states``: the number of states of each variable."""
    return tuple(_row(limit, mesh, price, moved, sent, states) for limit, sent in zip(limits, own, strict=True))


def _row(
    limit: Communication, mesh: Mesh, price: Price, moved: Sequence[SentTensor], own: Mapping[int, np.ndarray], states: Sequence[int]
) -> Row:
    axis = mesh.axis(limit.axis)
    nodes = {var: sent.copy() for var, sent in own.items()}
    transfers = []
    for one in moved:
        ends = [(a, b) for a in one.layouts for b in one.layouts]
        sent = np.array([0 if a is None or b is None else path_bytes(a, b, one.shape, one.itemsize, mesh, price, axis) for a, b in ends])
        sent = sent.reshape(len(one.layouts), len(one.layouts))
        if one.transfer >= 0:
            transfers.append((one.transfer, sent))
        else:
            weights = nodes.setdefault(one.var, np.zeros(states[one.var]))
            weights[one.state] += sent[0, 1]
    return Row(float(limit.at_most), tuple(nodes.items()), tuple(transfers), name=str(limit))


def own_bytes(
    axis: str, variables: Mapping[str, tuple[int, tuple[OpSpec, ...]]], prices: Prices, runs: Callable[[int], Sequence[int]]
) -> dict[int, np.ndarray]:
    """Variable -> the bytes on an axis that the collectives of its nodes send, in each state; ``runs``: how often they run, by variable."""
    found: dict[int, np.ndarray] = {}
    for name, (var, specs) in variables.items():
        sent = np.array([prices.sent(name, spec).get(axis, 0.0) for spec in specs])
        if sent.any():
            found[var] = found.get(var, np.zeros(len(specs))) + sent * runs(var)
    return found


def check_limits(plan: ShardingPlan, limits: Sequence[Communication]) -> None:
    """Raises PlanError if the plan's collectives, counted independently of the rows, exceed a limit."""
    for limit in limits:
        sent = sum(c.bytes for c in plan.collectives if c.axis == limit.axis)
        if sent > limit.at_most * (1 + TOLERANCE):
            what = f"the plan sends {sent} bytes on axis {limit.axis}, more than {limit}"
            raise PlanError(what, where=f"plan on mesh {plan.mesh}", remedy="this is a fault of the choose pass; please report it")
