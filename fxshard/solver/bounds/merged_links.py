"""Message passing with one table for all links between two nodes.

Two nodes are often linked several times: by an edge, and by several values that one computes and the other reads. Separate links are
relaxed separately, each with the best pair of states for itself. Their sum in one table is relaxed once, so that bounds are higher
and there are fewer messages. Only the splits of shared prices need separate links (`links.Splits.rebalance`), so message passing runs on
these first, and on the merged ones, whose splits stay as they are, afterwards.
"""

from __future__ import annotations

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.bounds.links import Link, Splits
from fxshard.solver.bounds.sweep_kernels import Wiring
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.arrays import FloatArray, IntArray, starts

MOST_ENTRIES = 100_000_000
"""The most table entries of separate links that are merged; the merged ones, which repeated layers do not share, need at most 0.8 GB."""


class MergedLinks:
    """The links of a sweeper, merged. As `Splits`, with tables that follow those of the separate links, and splits that stay.

    States are in one class where they are in one class of every separate link.
    """

    def __init__(self, separate: Splits, wiring: Wiring) -> None:
        self.separate, self._wiring = separate, wiring
        count = len(wiring.offset) - 1
        pairs, group = np.unique(wiring.ends[0] * count + wiring.ends[1], return_inverse=True)
        ends = np.stack([pairs // count, pairs % count])
        sizes = np.diff(wiring.offset)[ends].T  # (merged links, ends)
        first, members = starts(np.bincount(group, minlength=len(pairs))), np.argsort(group, kind="stable")
        begin = starts(sizes.ravel())
        classes, states = np.empty((2, int(begin[-1])), dtype=np.int64)
        numbers = np.empty(2 * len(pairs), dtype=np.int64)
        refine(wiring, first, members, begin, classes, states, numbers)
        self._shapes = numbers.reshape(-1, 2)
        self._places = first, members, begin, states, self._shapes
        parts = np.split(classes, begin[1:-1])
        shapes = zip(parts[::2], parts[1::2], ends.T.tolist(), self._shapes.tolist(), strict=True)
        self.links = [Link(i, j, rows, columns, (height, width)) for rows, columns, (i, j), (height, width) in shapes]
        self.own = starts(self._shapes.prod(axis=1))
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
        relate(self._wiring, *self._places, self.own, self.values, self._wiring.table, self.separate.values, True)

    def messages(self, direction: int, sent: FloatArray) -> FloatArray:
        """The sum of the messages of the separate links in a direction, one number per class of the receiver, link by link."""
        begins = starts(self._shapes[:, 1 - direction])
        found = np.zeros(int(begins[-1]))
        add_messages(self._wiring, direction, sent, *self._places, begins, found)
        return found

    def table(self, index: int, values: FloatArray | None = None) -> FloatArray:
        """As `Splits.table`."""
        return (self.values if values is None else values)[self.own[index] : self.own[index + 1]].reshape(self.links[index].shape)

    def separated(self, tables: list[FloatArray]) -> tuple[list[Link], list[FloatArray], list[FloatArray]]:
        """The separate links, the least entry of the merged tables given for each entry of theirs, and their own tables."""
        numbers, whole = range(len(self.separate.links)), np.concatenate([*(table.ravel() for table in tables), np.zeros(0)])
        least = np.full(int(self.separate.own[-1]), np.inf)
        relate(self._wiring, *self._places, self.own, whole, self.separate.own, least, False)
        return self.separate.links, [self.separate.table(k, least) for k in numbers], [self.separate.table(k) for k in numbers]

    def price(self, rates: FloatArray) -> None:
        """As `Splits.price`."""
        if not np.array_equal(rates, self.rates):
            self.separate.price(rates)
            self.merge()

    def rebalance(self, slack: FloatArray) -> None:
        """Nothing: the splits stay."""


def worth_merging(sweeper: Sweeper) -> bool:
    """Whether two nodes have several links, and the merged tables would not need too much memory."""
    return len({link.ends for link in sweeper.links}) < len(sweeper.links) and int(sweeper.splits.own[-1]) <= MOST_ENTRIES


class MergedSweeper(Sweeper):
    """A sweeper with merged links, at the costs and messages of another one, whose prices it changes with its own."""

    splits: MergedLinks

    def __init__(self, separate: Sweeper) -> None:
        assert isinstance(separate.splits, Splits)
        super().__init__(separate.model, MergedLinks(separate.splits, separate.wiring))
        self.theta, self.weights = separate.theta.copy(), separate.weights.copy()
        self.messages = [self.splits.messages(direction, separate.messages[direction]) for direction in (0, 1)]

    def restore(self, state: tuple[FloatArray, ...]) -> None:
        super().restore(state)
        self.splits.merge()

    def _arrays(self) -> tuple[FloatArray, ...]:
        return self.theta, self.weights, *self.messages, self.splits.separate.values, self.splits.rates


@compiled
def refine(
    wiring: Wiring, first: IntArray, members: IntArray, begin: IntArray, classes: IntArray, states: IntArray, numbers: IntArray
) -> None:
    """Write the class of each state, the first state of each class, and the number of classes, merged link by link and end by end.

    The separate links of a merged one are ``members``, from ``first`` on; the states of its ends begin at ``begin``.
    """
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
def relate(
    wiring: Wiring,
    first: IntArray,
    members: IntArray,
    begin: IntArray,
    states: IntArray,
    shapes: IntArray,
    own: IntArray,
    merged: FloatArray,
    tables: IntArray,
    separate: FloatArray,
    add: bool,
) -> None:
    """add: add the entries of separate tables to the merged ones that they are part of; else lower them to the least of these.

    first to states: as in `refine`. shapes: (links, 2) numbers of classes. own, tables: where each merged and each separate table begins.
    """
    for group in range(len(shapes)):
        rows, columns = begin[2 * group], begin[2 * group + 1]
        height, across = shapes[group]
        for position in range(first[group], first[group + 1]):
            link = members[position]
            for a in range(height):
                row = wiring.classes[wiring.start[0, link] + states[rows + a]]
                table, cell = tables[link] + row * wiring.sizes[1, link], own[group] + a * across
                for b in range(across):
                    entry = table + wiring.classes[wiring.start[1, link] + states[columns + b]]
                    if add:
                        merged[cell + b] += separate[entry]
                    else:
                        separate[entry] = min(separate[entry], merged[cell + b])


@compiled
def add_messages(
    wiring: Wiring,
    direction: int,
    sent: FloatArray,
    first: IntArray,
    members: IntArray,
    begin: IntArray,
    states: IntArray,
    shapes: IntArray,
    begins: IntArray,
    merged: FloatArray,
) -> None:
    """Add the messages of separate links in a direction. first to shapes: as in `relate`."""
    end = 1 - direction
    for group in range(len(shapes)):
        low = begin[2 * group + end]
        for position in range(first[group], first[group + 1]):
            link = members[position]
            for k in range(shapes[group, end]):
                own = wiring.classes[wiring.start[end, link] + states[low + k]]
                merged[begins[group] + k] += sent[wiring.message[direction, link] + own]
