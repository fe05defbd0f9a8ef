"""Messages of a tied model as those of the whole, to begin with.

A link of a tied model stands for many of the whole: each gets its part of the messages, and of the prices that readers share. Bounds hold
for any messages and splits; these come from where many sweeps have been, each a small part of one of the whole.
"""

from __future__ import annotations

import numpy as np

from .arrays import IntArray
from .sweeps import Sweeper


def spread(tied: Sweeper, whole: Sweeper, of: IntArray, links: IntArray) -> None:
    """Give a sweeper that has not begun the messages and splits of a tied one, whose nodes have as many states.

    of: (nodes of the whole,) the class of each. links: (links of the whole,) the link of the tied model that each is part of, -1 for none.
    """
    counts = np.bincount(links[links >= 0], minlength=len(tied.links))
    for k in np.flatnonzero(links >= 0).tolist():
        link, part = whole.links[k], int(links[k])
        for end, node in enumerate(link.ends):
            there = 0 if tied.links[part].i == of[node] else 1
            message = np.floor(tied.messages[1 - there][_arriving(tied, part, there)] / counts[part])
            whole.messages[1 - end][_arriving(whole, k, end)] = message
            whole.weights[whole.offset[node] : whole.offset[node + 1]] += message[link.classes(end)]
    sharing = whole.splits.sharing
    for first, last in zip(sharing.first[:-1], sharing.first[1:], strict=True):
        shared = sharing.link[first:last]
        if (links[shared] >= 0).all():
            _split(tied, whole, shared.tolist(), links, counts)


def _arriving(sweeper: Sweeper, link: int, end: int) -> slice:
    """Where the message to an end of a link stands among those of its direction."""
    begins = sweeper.wiring.message[1 - end]
    return slice(int(begins[link]), int(begins[link + 1]))


def _split(tied: Sweeper, whole: Sweeper, shared: list[int], links: IntArray, counts: IntArray) -> None:
    """Split the prices of one transfer as in the tied model; the first reader of each gets what rounding leaves.

    As it was where that would be more than the prices, since transfers with other numbers of readers were made one.
    """
    transfer = whole.model.transfers[whole.links[shared[0]].transfer]
    allowed = np.isfinite(transfer.prices)
    rest = np.where(allowed, transfer.prices, 0.0)
    have, parts = np.unique(transfer.have), []
    for k in shared:
        link, part = whole.links[k], int(links[k])
        cells = np.ix_(have, np.unique(transfer.readers[link.reader][1]))
        across = tied.links[part].i != tied.model.transfers[tied.links[part].transfer].source
        table = tied.splits.table(part)
        own = np.where(allowed[cells], np.floor((table.T if across else table) / counts[part]), 0.0)
        rest[cells] -= own
        parts.append((whole.splits.table(k), link.i != transfer.source, cells, own))
    if rest.min(initial=0.0) < 0:
        return
    for table, across, cells, own in parts:
        new = np.where(allowed[cells], own + rest[cells], np.inf)
        rest[cells] = 0.0
        table[:] = new.T if across else new
