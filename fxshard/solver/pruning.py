"""Reduced-cost fixing: states and pairs that the bound proves to be in no better plan are forbidden.

After a sweep the model is a sum of nonnegative slacks on top of the bound. A second pass in the other direction
collects along the chains what each state costs at least (its *excess*); what reaches the cutoff goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .arrays import FloatArray
from .bounds import Ascent
from .infeasible import Exhausted
from .links import Link
from .model import Model


@dataclass(frozen=True)
class Slacks:
    """A model as constant + node costs + slacks of links, with `inf` for what is in no plan below the cutoff.

    costs: per node (k,), with the memory prices taken out again. tables: per link of the sweeper, by classes. splits: the
    part of each table that is a price split; transfers cost what their prices exceed the splits by on top of all links.
    room: what a better plan may cost above the bound.
    """

    constant: float
    costs: list[FloatArray]
    tables: list[FloatArray]
    splits: list[FloatArray]
    room: float


def prune(ascent: Ascent) -> Model:
    """The model rewritten by its slacks; the choices and their costs stay what they were. No transfers."""
    slacks = find_slacks(ascent)
    edges = {link.ends: table for link, table in zip(ascent.sweeper.links, slacks.tables, strict=True)}
    return replace(ascent.model, costs=slacks.costs, edges=edges, constant=slacks.constant, prices=ascent.multipliers)


def find_slacks(ascent: Ascent) -> Slacks:
    """One more sweep against node order, and what it proves."""
    model, sweeper = ascent.model, ascent.sweeper
    sweeper.sweep(1)
    tables, rest = sweeper.slack_tables(1)
    kept = [rest[sweeper.states(node)] for node in range(len(model))]
    least = [float(values.min()) for values in (*kept, *tables)]
    if np.isinf(least).any():
        raise Exhausted
    total = model.constant + sum(least)
    kept = [values - low for values, low in zip(kept, least, strict=False)]
    tables = [table - low for table, low in zip(tables, least[len(kept) :], strict=True)]
    room = model.cutoff - (total - ascent.memory.allowance(ascent.multipliers))
    excess, arrived = _collect(sweeper.links, tables, kept, sweeper.chains)
    tables = [
        _prune_pairs(link, table, excess, came, sweeper.chains, room)
        for link, table, came in zip(sweeper.links, tables, arrived, strict=True)
    ]
    paid = sweeper.theta[:-1] - np.concatenate(model.costs)
    costs = []
    for node, values in enumerate(kept):
        cost = values - paid[sweeper.states(node)]
        costs.append(np.where(excess[node] >= room, np.inf, cost))
    return Slacks(total, costs, tables, [sweeper.splits.table(link) for link in sweeper.links], room)


def _collect(
    links: list[Link], slack: list[FloatArray], kept: list[FloatArray], chains: FloatArray
) -> tuple[list[FloatArray], list[FloatArray]]:
    """Per node the excess of its states, in node order; per link the part of it that came over that link, by classes."""
    excess = list(kept)
    arrived = [np.zeros(0)] * len(links)
    for index in sorted(range(len(links)), key=lambda k: links[k].ends):
        link = links[index]
        part = _by_class(np.floor(excess[link.i] / chains[link.i]), link, 0)
        arrived[index] = (part[:, None] + slack[index]).min(axis=0)
        excess[link.j] = excess[link.j] + arrived[index][link.columns]
    return excess, arrived


def _by_class(values: FloatArray, link: Link, end: int) -> FloatArray:
    """The least of each class of a link's end."""
    least = np.full(link.table.shape[end], np.inf)
    np.minimum.at(least, link.classes(end), values)
    return least


def _prune_pairs(
    link: Link, table: FloatArray, excess: list[FloatArray], arrived: FloatArray, chains: FloatArray, room: float
) -> FloatArray:
    """`inf` where a pair's slack with the excess of its first state, or of all else at its second, fills the room."""
    part = _by_class(np.floor(excess[link.i] / chains[link.i]), link, 0)
    with np.errstate(invalid="ignore"):
        others = _by_class(excess[link.j], link, 1) - arrived
        others = np.where(np.isnan(others), np.inf, others)
    bad = (_by_class(excess[link.i], link, 0)[:, None] + table >= room) | (part[:, None] + table + others >= room)
    return np.where(bad, np.inf, table)
