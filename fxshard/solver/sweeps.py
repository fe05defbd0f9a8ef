"""Sequential tree-reweighted message passing (TRW-S), many links at a time.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (PAMI 2006). A sweep visits nodes in
order; nodes of the same *level* have no link between them, so all their outgoing links are updated by a few numpy calls
on padded arrays. Everything is an integer in float64 and messages are capped so that sums stay below 2^53: the bound is
exact, and it is valid for any messages whatever, and for any split of shared prices (`links.Splits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray, IntArray
from .links import Link, Splits
from .model import Model, Pair

PADDING_WASTE = 6_000
"""Padded entries that cost as much as one more group of numpy calls."""


@dataclass(frozen=True)
class Group:
    """Links updated together, from nodes of one level to nodes further on; padded to (e, a, b) classes.

    Where the classes of a link's end are many states each, a class is as cheap as its cheapest state.
    """

    links: IntArray  # (e,)
    table: FloatArray  # (e, a, b), rows are the classes of the sending node, inf where padded
    source: IntArray  # positions of the senders' states, sorted by link and class
    share: FloatArray  # 1 / number of chains through the sender, for each of them
    cuts: IntArray  # where in `source` each class begins
    place: IntArray  # (e, a) which class, any where padded
    inward: IntArray  # (e, a) positions of the message that comes back
    outward: IntArray  # (e, b) positions of the message that is sent
    target: IntArray  # positions of the receivers' states
    read: IntArray  # where in (e, b) the class of each of them is
    cells: IntArray  # the entries that are split: their places in Splits.values,
    entry: IntArray  # in `table`,
    column: IntArray  # and, of their columns, in (e, b)


@dataclass(frozen=True)
class Level:
    """Nodes decided together, and the groups of links that leave them."""

    nodes: IntArray  # (n,)
    states: IntArray  # (n, k) positions of their states, padded
    groups: list[Group]


class Sweeper:
    """Messages of one model, and the bounds and plans they give.

    `weights` is S (states,): node costs plus all incoming messages. Positions beyond the last state are padding: `inf`
    there. Direction 0 runs in node order, direction 1 against it. A message holds a number per class of its receiver.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._sizes = sizes = [len(cost) for cost in model.costs]
        self.offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.splits = Splits(model)
        self.links = self.splits.links
        assert all(bool(np.isfinite(cost).all()) for cost in model.costs), "a state is forbidden by itself: its messages prove nothing"
        self.theta = np.append(np.concatenate(model.costs) if sizes else np.zeros(0), np.inf)
        self.weights = self.theta.copy()
        lengths = [[link.table.shape[1 - d] for link in self.links] for d in (0, 1)]
        self.starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in lengths]
        self.messages = [np.zeros(int(start[-1]) + 1) for start in self.starts]
        degrees = [np.bincount([link.ends[d] for link in self.links], minlength=len(sizes)).astype(np.float64) for d in (0, 1)]
        self.chains = np.maximum(np.maximum(degrees[0], degrees[1]), 1.0)
        most = int((degrees[0] + degrees[1]).max(initial=0.0))
        self.cap = float(2 ** int(51 - np.ceil(np.log2(most + 2))))
        self._spread = np.repeat(np.arange(len(sizes)), sizes)
        self._out = [degrees[d][self._spread] for d in (0, 1)]
        self._share = 1.0 / self.chains[self._spread]
        self._slack = np.zeros(len(self.splits.values))
        self._stale = [False, False]
        order = _levels(len(sizes), [link.ends for link in self.links])
        self.levels = [self._build(d, order if d == 0 else -order) for d in (0, 1)]
        self.entries = 2 * (sum(sizes) + sum(link.table.size for link in self.links))

    def set_costs(self, theta: FloatArray) -> None:
        """Replace the node costs (states,), for example by another price of memory; messages stay."""
        self.weights[:-1] += theta - self.theta[:-1]
        self.theta[:-1] = theta

    def sweep(self, direction: int) -> float:
        """Update all messages in one direction, then the splits; the bound on min E that they prove, `inf` if nothing is allowed."""
        back, sent = self.messages[1 - direction], self.messages[direction]
        total = 0.0
        self._refresh(direction)
        with np.errstate(invalid="ignore"):
            for level in self.levels[direction]:
                for group in level.groups:
                    give = np.minimum.reduceat(np.floor(self.weights[group.source] * group.share), group.cuts)
                    slack = group.table + (give[group.place] - back[group.inward])[:, :, None]
                    message = slack.min(axis=1)
                    if len(group.cells):
                        self._slack[group.cells] = slack.ravel()[group.entry] - message.ravel()[group.column]
                    least = message.min(axis=1)
                    total += float(least.sum())
                    message -= least[:, None]
                    np.minimum(message, self.cap, out=message)
                    change = message - sent[group.outward]
                    np.add.at(self.weights, group.target, change.ravel()[group.read])
                    sent[group.outward] = message
                    sent[-1] = 0.0
        total += self.model.constant + float(self._minima(self.remainders(direction)).sum())
        if len(self._slack) and np.isfinite(total):
            self.splits.rebalance(self._slack)
            self._stale = [True, True]
        return total if np.isfinite(total) else np.inf  # costs are finite, so some table allows no pair at all

    def shares(self) -> FloatArray:
        """What each node gives to each link that leaves it, (states,)."""
        return np.floor(self.weights[:-1] * self._share)

    def remainders(self, direction: int) -> FloatArray:
        """What nodes keep after giving to the links that leave them in this direction, (states,)."""
        return self.weights[:-1] - self._out[direction] * self.shares()

    def decode(self, direction: int) -> IntArray | None:
        """Choices made in node order, each conditioned on those before and on messages for those to come."""
        self._refresh(direction)
        rest = self.weights.copy()
        positions, entries = self._arrivals(direction)
        np.subtract.at(rest, positions, self.messages[direction][entries])
        choices = np.zeros(len(self.model), dtype=np.int64)
        for level in self.levels[direction]:
            local = rest[level.states]
            choices[level.nodes] = local.argmin(axis=1)
            if np.isinf(local.min(axis=1)).any():
                return None
            for group in level.groups:
                row = [self.links[k].classes(direction)[choices[self.links[k].ends[direction]]] for k in group.links]
                np.add.at(rest, group.target, group.table[np.arange(len(row)), row].ravel()[group.read])
        return choices

    def slack_tables(self, direction: int) -> tuple[list[FloatArray], FloatArray]:
        """After a sweep: per link its slack by classes once the sender's share is added, and what nodes keep, (states,).

        Both are nonnegative up to constants, and with the surcharges of transfers they add up to the model's cost.
        """
        shares, kept = self.shares(), self.weights[:-1].copy()
        tables = []
        for index, link in enumerate(self.links):
            sender, classes = self.states(link.ends[direction]), link.classes(direction)
            given = np.full(link.table.shape[direction], np.inf)
            np.minimum.at(given, classes, shares[sender])
            kept[sender] -= np.where(np.isfinite(given), given, 0.0)[classes]
            table = self.splits.table(link) - self.message(1, index)[:, None] - self.message(0, index)
            tables.append(table + (given if direction else given[:, None]))
        return tables, kept

    def message(self, direction: int, index: int) -> FloatArray:
        """The message of one link: to its second node in direction 0, to its first in direction 1."""
        start = self.starts[direction]
        return self.messages[direction][start[index] : start[index + 1]]

    def states(self, node: int) -> slice:
        """Positions of a node's states."""
        return slice(int(self.offset[node]), int(self.offset[node + 1]))

    def _minima(self, values: FloatArray) -> FloatArray:
        return np.minimum.reduceat(values, self.offset[:-1]) if len(self.model) else values

    def _refresh(self, direction: int) -> None:
        """Bring the tables of a direction's groups up to date with the splits."""
        if self._stale[direction]:
            for level in self.levels[direction]:
                for group in level.groups:
                    if len(group.cells):
                        group.table.ravel()[group.entry] = self.splits.values[group.cells]
            self._stale[direction] = False

    def _arrivals(self, direction: int) -> tuple[IntArray, IntArray]:
        """Positions of the states that receive messages of a direction, and of the message entry that each receives."""
        none = np.zeros(0, dtype=np.int64)
        start = self.starts[direction]
        positions = [np.arange(self.offset[n], self.offset[n + 1]) for n in (link.ends[1 - direction] for link in self.links)]
        entries = [start[k] + link.classes(1 - direction) for k, link in enumerate(self.links)]
        return np.concatenate([*positions, none]), np.concatenate([*entries, none])

    def _build(self, direction: int, order: IntArray) -> list[Level]:
        """Levels in the order of the sweep, with their links grouped by similar shape."""
        leaving: dict[int, list[int]] = {}
        for index, link in enumerate(self.links):
            leaving.setdefault(int(order[link.ends[direction]]), []).append(index)
        members: dict[int, list[int]] = {}
        for node, level in enumerate(order):
            members.setdefault(int(level), []).append(node)
        return [self._level(members[level], leaving.get(level, []), direction) for level in sorted(members)]

    def _level(self, nodes: list[int], links: list[int], direction: int) -> Level:
        shape = {k: (self.links[k].table.shape[direction], self.links[k].table.shape[1 - direction]) for k in links}
        groups = [self._group(part, direction) for part in _similar(sorted(links, key=lambda k: (shape[k], k)), shape)]
        width = max(self._sizes[node] for node in nodes)
        return Level(np.asarray(nodes), self._positions(self.offset, nodes, width), groups)

    def _group(self, indexes: list[int], direction: int) -> Group:
        links = [self.links[k] for k in indexes]
        tables = [self.splits.table(link).T if direction else self.splits.table(link) for link in links]
        a, b = max(t.shape[0] for t in tables), max(t.shape[1] for t in tables)
        table = np.full((len(links), a, b), np.inf)
        for row, t in enumerate(tables):
            table[row, : t.shape[0], : t.shape[1]] = t
        senders = [link.ends[direction] for link in links]
        source, cuts = self._classes(links, direction)
        counts = np.asarray([len(t) for t in tables])
        place = np.cumsum(counts)[:, None] - counts[:, None] + np.arange(a)
        sizes = [self._sizes[n] for n in senders]
        return Group(
            np.asarray(indexes, dtype=np.int64),
            table,
            source,
            np.repeat(1.0 / self.chains[senders], sizes),
            cuts,
            np.minimum(place, len(cuts) - 1),
            self._positions(self.starts[1 - direction], indexes, a),
            self._positions(self.starts[direction], indexes, b),
            np.concatenate([np.arange(self.offset[n], self.offset[n + 1]) for n in (link.ends[1 - direction] for link in links)]),
            np.concatenate([row * b + link.classes(1 - direction) for row, link in enumerate(links)]),
            *_cells(links, direction, a, b),
        )

    def _classes(self, links: list[Link], direction: int) -> tuple[IntArray, IntArray]:
        """Positions of the senders' states sorted by class, and where in them each class begins."""
        source, cuts, start = [], [], 0
        for link in links:
            classes = link.classes(direction)
            order = np.argsort(classes, kind="stable")
            source.append(self.offset[link.ends[direction]] + order)
            cuts.append(start + np.searchsorted(classes[order], np.arange(link.table.shape[direction])))
            start += len(classes)
        return np.concatenate(source), np.concatenate(cuts)

    @staticmethod
    def _positions(starts: IntArray, items: list[int], width: int) -> IntArray:
        """Positions (n, width) of the entries of each item, the last position of all where padded."""
        index = np.asarray(items, dtype=np.int64)
        positions = starts[index][:, None] + np.arange(width)
        return np.where(positions < starts[index + 1][:, None], positions, starts[-1])


def _cells(links: list[Link], direction: int, a: int, b: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of the entries that are split: places in `Splits.values`, in the group's (e, a, b) and in its (e, b)."""
    places: tuple[list[IntArray], list[IntArray], list[IntArray]] = ([], [], [])
    for number, link in enumerate(links):
        if link.cells >= 0:
            cells = link.cells + np.arange(link.table.size).reshape(link.table.shape)
            cells = cells.T if direction else cells
            rows, columns = np.indices(cells.shape)
            places[0].append(cells.ravel())
            places[1].append(((number * a + rows) * b + columns).ravel())
            places[2].append((number * b + columns).ravel())
    none = np.zeros(0, dtype=np.int64)
    cells, entry, column = (np.concatenate([*part, none]) for part in places)
    return cells, entry, column


def _levels(count: int, pairs: list[Pair]) -> IntArray:
    """Longest path to each node over links from lower to higher index."""
    level = np.zeros(count, dtype=np.int64).tolist()
    for i, j in sorted(pairs):
        level[j] = max(level[j], level[i] + 1)
    return np.asarray(level, dtype=np.int64)


def _similar(links: list[int], shape: dict[int, Pair]) -> Iterator[list[int]]:
    """Split links sorted by shape where padding them to one shape would waste too much."""
    group: list[int] = []
    rows = columns = area = 0
    for link in links:
        a, b = max(rows, shape[link][0]), max(columns, shape[link][1])
        size = area + shape[link][0] * shape[link][1]
        if group and a * b * (len(group) + 1) - size > PADDING_WASTE:
            yield group
            group, size, (a, b) = [], shape[link][0] * shape[link][1], shape[link]
        group.append(link)
        rows, columns, area = a, b, size
    if group:
        yield group
