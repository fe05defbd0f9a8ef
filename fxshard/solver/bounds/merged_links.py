"""Message passing with one table for all links between two nodes.

Two nodes are often linked several times: by an edge, and by several values that one computes and the other reads. Separate links are
relaxed separately, each with the best pair of states for itself. Their sum in one table is relaxed once, so that bounds are higher
and there are fewer messages. Only the splits of shared prices need separate links (`links.Splits.rebalance`), so message passing runs on
these first, and on the merged ones, whose splits stay as they are, afterwards.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.bounds.links import Link, Splits
from fxshard.solver.bounds.sweep_kernels import Wiring
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import FloatArray, IntArray, starts

MOST_ENTRIES = 100_000_000
"""The most entries of merged tables, which repeated layers do not share: 0.8 GB."""

GROWS = 4
"""The most entries of merged tables over those of separate ones: two links of L classes may make a table of L^2 rows."""


class Merging(NamedTuple):
    """G merged links, one for each pair of nodes that are linked, and the links of which each consists.

    States are in one class of a merged link where they are in one class of each of its links.
    """

    ends: IntArray  # (2, G) nodes
    first: IntArray  # (G + 1,) where the links of each begin in `members`
    members: IntArray  # (L,) links
    begin: IntArray  # (2 G + 1,) where the states of each end begin in `classes` and `states`
    classes: IntArray  # the class of each state, merged link by merged link and end by end
    states: IntArray  # the first state of each class; an end has as many places as states
    shapes: IntArray  # (G, 2) numbers of classes

    @classmethod
    def of(cls, wiring: Wiring) -> Merging:
        """All links between two nodes merged."""
        count = len(wiring.offset) - 1
        pairs, group = np.unique(wiring.ends[0] * count + wiring.ends[1], return_inverse=True)
        ends = np.stack([pairs // count, pairs % count])
        first, members = starts(np.bincount(group, minlength=len(pairs))), np.argsort(group, kind="stable")
        begin = starts(np.diff(wiring.offset)[ends].T.ravel())
        classes, states, shapes = (np.empty(n, dtype=np.int64) for n in (begin[-1], begin[-1], 2 * len(pairs)))
        refine(wiring, first, members, begin, classes, states, shapes)
        return cls(ends, first, members, begin, classes, states, shapes.reshape(-1, 2))

    def worthwhile(self, entries: int) -> bool:
        """Whether two nodes have several links, and the tables do not grow too much; entries: those of the separate tables."""
        merged = float(self.shapes.prod(axis=1, dtype=np.float64).sum())
        return len(self.shapes) < len(self.members) and merged <= min(MOST_ENTRIES, GROWS * entries)

    def links(self) -> list[Link]:
        """The merged links."""
        parts = [self.classes[begin:end] for begin, end in pairwise(self.begin)]
        shapes = zip(parts[::2], parts[1::2], self.ends.T.tolist(), self.shapes.tolist(), strict=True)
        return [Link(i, j, rows, columns, (height, width)) for rows, columns, (i, j), (height, width) in shapes]


class MergedLinks:
    """The links of a sweeper, merged. As `Splits`, but tables follow those of the separate links, and splits stay as they are."""

    def __init__(self, separate: Splits, wiring: Wiring, merging: Merging) -> None:
        self.separate, self._wiring, self._merging = separate, wiring, merging
        self.links = merging.links()
        self.own = starts(merging.shapes.prod(axis=1))
        self.start = self.own[:-1]
        self.shared = np.zeros(len(self.links), dtype=np.int64)
        self.values = np.empty(int(self.own[-1]))
        self.merge()

    @property
    def rates(self) -> FloatArray:
        """As `Splits.rates`."""
        return self.separate.rates

    def merge(self) -> None:
        """Compute the tables from those of the separate links."""
        self.values[:] = 0.0
        relate(self._wiring, self._merging, self.own, self.values, self._wiring.table, self.separate.values, True)

    def messages(self, direction: int, sent: FloatArray) -> FloatArray:
        """The sum of the messages of the separate links in a direction, one number per class of the receiver, link by link."""
        begins = starts(self._merging.shapes[:, 1 - direction])
        found = np.zeros(int(begins[-1]))
        add_messages(self._wiring, self._merging, direction, sent, begins, found)
        return found

    def table(self, index: int, values: FloatArray | None = None) -> FloatArray:
        """As `Splits.table`."""
        return (self.values if values is None else values)[self.own[index] : self.own[index + 1]].reshape(self.links[index].shape)

    def separated(self, tables: list[FloatArray]) -> tuple[list[Link], list[FloatArray], list[FloatArray]]:
        """The separate links, the least entry of the merged tables given for each entry of theirs, and their own tables."""
        merged = np.concatenate([*(table.ravel() for table in tables), np.zeros(0)])
        least = np.full(int(self.separate.own[-1]), np.inf)
        relate(self._wiring, self._merging, self.own, merged, self.separate.own, least, False)
        numbers = range(len(self.separate.links))
        return self.separate.links, [self.separate.table(k, least) for k in numbers], [self.separate.table(k) for k in numbers]

    def price(self, rates: FloatArray) -> None:
        """As `Splits.price`; `merge` comes after it."""
        self.separate.price(rates)

    def rebalance(self, slack: FloatArray) -> None:
        """Nothing: the splits stay."""


class MergedSweeper(Sweeper):
    """A sweeper with merged links, at the costs and messages of another one, whose prices it changes with its own."""

    splits: MergedLinks

    def __init__(self, separate: Sweeper, merging: Merging) -> None:
        assert isinstance(separate.splits, Splits)
        super().__init__(separate.model, MergedLinks(separate.splits, separate.wiring, merging))
        self.theta, self.weights = separate.theta.copy(), separate.weights.copy()
        self.messages = [self.splits.messages(direction, separate.messages[direction]) for direction in (0, 1)]

    def set_costs(self, theta: FloatArray, rates: FloatArray) -> None:
        super().set_costs(theta, rates)
        self.splits.merge()  # at equal rates, too: sweeps on separate links split prices anew

    def restore(self, state: tuple[FloatArray, ...]) -> None:
        super().restore(state)
        self.splits.merge()

    def _arrays(self) -> tuple[FloatArray, ...]:
        return self.theta, self.weights, *self.messages, self.splits.separate.values, self.splits.rates


@compiled
def refine(
    wiring: Wiring, first: IntArray, members: IntArray, begin: IntArray, classes: IntArray, states: IntArray, numbers: IntArray
) -> None:
    """Write `classes`, `states` and, flat, `shapes` of a `Merging` with these `first`, `members` and `begin`."""
    for place in range(len(numbers)):
        group, end = place // 2, place % 2
        low, count = begin[place], 0
        for state in range(begin[place + 1] - low):
            known = -1
            for k in range(count):
                same = True
                for position in range(first[group], first[group + 1]):
                    at = wiring.start[end, members[position]]
                    if wiring.classes[at + state] != wiring.classes[at + states[low + k]]:
                        same = False
                        break
                if same:
                    known = k
                    break
            if known < 0:
                known = count
                states[low + count] = state
                count += 1
            classes[low + state] = known
        numbers[place] = count


@compiled
def relate(wiring: Wiring, merging: Merging, own: IntArray, merged: FloatArray, start: IntArray, separate: FloatArray, add: bool) -> None:
    """Relate each entry of a merged table to one entry of each separate table that it consists of.

    add: each merged entry rises by its separate entries; else each separate entry is lowered to the least of its merged ones. own: (G + 1,)
    where each merged table begins in `merged`; start: (L,) where each separate table begins in `separate`.
    """
    for group in range(len(merging.shapes)):
        rows, columns = merging.begin[2 * group], merging.begin[2 * group + 1]
        height, width = merging.shapes[group]
        for position in range(merging.first[group], merging.first[group + 1]):
            link = merging.members[position]
            for a in range(height):
                row = wiring.classes[wiring.start[0, link] + merging.states[rows + a]]
                table, cell = start[link] + row * wiring.sizes[1, link], own[group] + a * width
                for b in range(width):
                    entry = table + wiring.classes[wiring.start[1, link] + merging.states[columns + b]]
                    if add:
                        merged[cell + b] += separate[entry]
                    else:
                        separate[entry] = min(separate[entry], merged[cell + b])


@compiled
def add_messages(wiring: Wiring, merging: Merging, direction: int, sent: FloatArray, begins: IntArray, merged: FloatArray) -> None:
    """Add to the messages of merged links in a direction those of their separate links, which are in `sent`.

    begins: (G + 1,) where the message of each merged link begins in `merged`: one number per class of its receiver.
    """
    end = 1 - direction
    for group in range(len(merging.shapes)):
        low = merging.begin[2 * group + end]
        for position in range(merging.first[group], merging.first[group + 1]):
            link = merging.members[position]
            for k in range(merging.shapes[group, end]):
                own = wiring.classes[wiring.start[end, link] + merging.states[low + k]]
                merged[begins[group] + k] += sent[wiring.message[direction, link] + own]
