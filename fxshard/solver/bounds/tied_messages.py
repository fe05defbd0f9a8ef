"""Initialise the messages of a model from those of its tied model (`tied_model`).

A link of the tied model stands for many links of the whole; each of these gets an equal part of its messages and of its shared prices.
Bounds hold for any messages and splits. These are good ones, since sweeps over the tied model are cheap.
"""

from __future__ import annotations

import numpy as np

from fxshard.solver.bounds.links import Splits
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import FloatArray, IntArray


def initialise_from_tied(tied: Sweeper, whole: Sweeper, of: IntArray, links: IntArray) -> None:
    """Set the messages and splits of a fresh sweeper from those of a tied one; nodes have the same numbers of states in both.

    of: (nodes of the whole,) the class of each. links: (links of the whole,) the link of the tied model that each is part of, -1 for none.
    """
    counts = np.bincount(links[links >= 0], minlength=len(tied.links))
    parts = [_parts(tied, int(k), int(count)) for k, count in enumerate(counts)]
    first = [link.i for link in tied.links]
    for end, nodes in enumerate(whole.wiring.ends):
        arriving, states = [np.zeros(0)], whole.wiring.sizes[end].tolist()
        for k, (part, node) in enumerate(zip(links.tolist(), of[nodes].tolist(), strict=True)):
            arriving.append(np.zeros(states[k]) if part < 0 else parts[part][0 if first[part] == node else 1])
        whole.messages[1 - end][:] = np.concatenate(arriving)
        whole.weights += _by_state(whole, end)
    assert isinstance(whole.splits, Splits)
    sharing, made = whole.splits.sharing, {}
    uses, rates = whole.model.moving.flat.first, whole.splits.rates
    for first, last in zip(sharing.first[:-1].tolist(), sharing.first[1:].tolist(), strict=True):
        shared = sharing.link[first:last].tolist()
        transfer = whole.links[shared[0]].transfer
        paid = tuple(rates[uses[transfer] : uses[transfer + 1]].tolist())
        stands = tuple(links[shared].tolist()), tuple(sharing.across[first:last].tolist()), paid
        if min(stands[0]) < 0:
            continue
        if stands not in made:  # transfers with the same tied links and rates have the same split
            made[stands] = _split(tied, whole, shared, links, counts)
        for k, table in zip(shared, made[stands], strict=False):
            whole.splits.table(k)[:] = table


def _by_state(whole: Sweeper, end: int) -> FloatArray:
    """(states,) the sum of the messages to each state over the links that have its node at this end."""
    wiring = whole.wiring
    nodes = wiring.ends[end]
    states = np.diff(whole.offset)[nodes]
    place = np.arange(states.sum()) - np.repeat(np.cumsum(states) - states, states)
    classes = wiring.classes[np.repeat(wiring.start[end], states) + place]
    arriving = whole.messages[1 - end][np.repeat(wiring.message[1 - end][:-1], states) + classes]
    found: FloatArray = np.bincount(np.repeat(whole.offset[nodes], states) + place, arriving, len(whole.weights)).astype(np.float64)
    return found


def _parts(tied: Sweeper, link: int, count: int) -> tuple[FloatArray, FloatArray]:
    """The messages to both ends of a link, divided by the number of links that it stands for."""
    begins = [tied.wiring.message[1 - end] for end in (0, 1)]
    first, second = (np.floor(tied.messages[1 - end][begins[end][link] : begins[end][link + 1]] / max(1, count)) for end in (0, 1))
    return first, second


def _split(tied: Sweeper, whole: Sweeper, shared: list[int], links: IntArray, counts: IntArray) -> list[FloatArray]:
    """The prices of one transfer, split as in the tied model, a table per reader; the first reader takes the rounding remainder.

    An empty list (the split stays as it was) where the parts would exceed the prices, as can happen when the tied model merged transfers
    with different numbers of readers.
    """
    transfer = whole.model.transfers[whole.links[shared[0]].transfer]
    rest, have, parts, tables = np.zeros(transfer.prices.shape), np.unique(transfer.have), [], []
    for k in shared:
        link, part = whole.links[k], int(links[k])
        across, cells = link.i != transfer.source, np.ix_(have, np.unique(transfer.readers[link.reader][1]))
        own, turned = whole.splits.table(k), tied.links[part].i != tied.model.transfers[tied.links[part].transfer].source
        own, share = own.T if across else own, tied.splits.table(part)
        allowed = np.isfinite(own)
        rest[cells] += np.where(allowed, own, 0.0)
        parts.append((across, cells, allowed, np.where(allowed, np.floor((share.T if turned else share) / counts[part]), 0.0)))
    for _, cells, _, own in parts:
        rest[cells] -= own
    if rest.min(initial=0.0) < 0:
        return []
    for across, cells, allowed, own in parts:
        table = np.where(allowed, own + rest[cells], np.inf)
        rest[cells] = 0.0
        tables.append(table.T if across else table)
    return tables
