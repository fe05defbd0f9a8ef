"""Reduced-cost fixing: states and pairs that the bound proves to be in no better plan are forbidden.

After a sweep the model is a sum of nonnegative slacks on top of the bound. A second pass in the other direction
collects along the chains what each state costs at least (its *excess*); what reaches the cutoff goes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .bounds import Ascent
from .model import Model, Pair
from .problem import FloatArray


def prune(ascent: Ascent) -> Model:
    """The model rewritten as bound + slacks, memory prices taken out again, with `inf` for what is in no better plan.

    The choices and their costs stay what they were.
    """
    model, sweeper = ascent.model, ascent.sweeper
    total = sweeper.sweep(1)
    paid = sweeper.theta[:-1] - np.concatenate(model.costs)
    allowance = ascent.memory.allowance(ascent.multipliers)
    room = model.cutoff - (total - allowance)
    kept = [sweeper.remainders(1)[sweeper.states(node)] for node in range(len(model))]
    kept = [values - values.min() for values in kept]
    slack = dict(sweeper.slack_tables(1))
    excess, arrived = _collect(model, slack, kept, sweeper.chains)
    edges = {pair: _prune_pairs(pair, table, excess, arrived, sweeper.chains, room) for pair, table in slack.items()}
    costs = []
    for node, values in enumerate(kept):
        cost = values - paid[sweeper.states(node)]
        costs.append(np.where(excess[node] >= room, np.inf, cost))
    return replace(model, costs=costs, edges=edges, constant=total, prices=ascent.multipliers)


def _collect(
    model: Model, slack: dict[Pair, FloatArray], kept: list[FloatArray], chains: FloatArray
) -> tuple[list[FloatArray], dict[Pair, FloatArray]]:
    """Per node the excess of its states, in node order; per edge the part of it that came over that edge."""
    excess = list(kept)
    arrived: dict[Pair, FloatArray] = {}
    for i, j in sorted(slack):
        part = np.floor(excess[i] / chains[i])
        arrived[i, j] = (part[:, None] + slack[i, j]).min(axis=0)
        excess[j] = excess[j] + arrived[i, j]
    return excess, arrived


def _prune_pairs(
    pair: Pair,
    table: FloatArray,
    excess: list[FloatArray],
    arrived: dict[Pair, FloatArray],
    chains: FloatArray,
    room: float,
) -> FloatArray:
    """`inf` where a pair's slack with the excess of its first state, or of all else at its second, fills the room."""
    i, j = pair
    part = np.floor(excess[i] / chains[i])
    with np.errstate(invalid="ignore"):
        others = np.where(np.isinf(excess[j]), np.inf, excess[j] - arrived[pair])
    bad = (excess[i][:, None] + table >= room) | (part[:, None] + table + others >= room)
    return np.where(bad, np.inf, table)
