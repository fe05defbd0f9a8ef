"""Sequential tree-reweighted message passing (TRW-S), many edges at a time.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (PAMI 2006). A sweep visits nodes in
order; nodes of the same *level* have no edge between them, so all their outgoing edges are updated by a few numpy calls
on padded arrays. Everything is an integer in float64 and messages are capped so that sums stay below 2^53: the bound is
exact, and it is valid for any messages whatever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .model import Model, Pair
from .problem import FloatArray, IntArray

PADDING_WASTE = 6_000
"""Padded entries that cost as much as one more group of numpy calls."""


@dataclass(frozen=True)
class Group:
    """Edges updated together: from nodes of one level to nodes further on; padded to (e, a, b)."""

    edges: IntArray  # (e,)
    table: FloatArray  # (e, a, b), rows are the states of the sending node, inf where padded
    source: IntArray  # (e, a) positions of the sender's states
    target: IntArray  # (e, b) positions of the receiver's states
    share: FloatArray  # (e, 1) 1 / number of chains through the sender
    inward: IntArray  # (e, a) positions of the message that comes back
    outward: IntArray  # (e, b) positions of the message that is sent


@dataclass(frozen=True)
class Level:
    """Nodes decided together, and the groups of edges that leave them."""

    nodes: IntArray  # (n,)
    states: IntArray  # (n, k) positions of their states, padded
    groups: list[Group]


class Sweeper:
    """Messages of one model, and the bounds and plans they give.

    `weights` is S (states,): node costs plus all incoming messages. Positions beyond the last state are padding: `inf`
    there. Direction 0 runs in node order, direction 1 against it.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._sizes = sizes = [len(cost) for cost in model.costs]
        self.offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.pairs = list(model.edges)
        self.theta = np.append(np.concatenate(model.costs) if sizes else np.zeros(0), np.inf)
        self.weights = self.theta.copy()
        lengths = [[len(model.costs[pair[1 - d]]) for pair in self.pairs] for d in (0, 1)]
        self.starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in lengths]
        self.messages = [np.zeros(int(start[-1]) + 1) for start in self.starts]
        degrees = [np.bincount([p[d] for p in self.pairs], minlength=len(sizes)).astype(np.float64) for d in (0, 1)]
        self.chains = np.maximum(np.maximum(degrees[0], degrees[1]), 1.0)
        most = max((len(n) for n in model.neighbours()), default=0)
        self.cap = float(2 ** int(51 - np.ceil(np.log2(most + 2))))
        self._spread = np.repeat(np.arange(len(sizes)), sizes)
        self._out = [degrees[d][self._spread] for d in (0, 1)]
        self._share = 1.0 / self.chains[self._spread]
        order = _levels(len(sizes), self.pairs)
        self.levels = [self._build(d, order if d == 0 else -order) for d in (0, 1)]
        self.entries = 2 * model.entries

    def set_costs(self, theta: FloatArray) -> None:
        """Replace the node costs (states,), for example by another price of memory; messages stay."""
        self.weights[:-1] += theta - self.theta[:-1]
        self.theta[:-1] = theta

    def sweep(self, direction: int) -> float:
        """Update all messages in one direction; the bound on min E that they prove, `inf` if nothing is allowed."""
        back, sent = self.messages[1 - direction], self.messages[direction]
        total = 0.0
        with np.errstate(invalid="ignore"):
            for level in self.levels[direction]:
                for group in level.groups:
                    give = np.floor(self.weights[group.source] * group.share)
                    give -= back[group.inward]
                    message = (group.table + give[:, :, None]).min(axis=1)
                    least = message.min(axis=1)
                    total += float(least.sum())
                    message -= least[:, None]
                    np.minimum(message, self.cap, out=message)
                    np.add.at(self.weights, group.target, message - sent[group.outward])
                    sent[group.outward] = message
                    sent[-1] = 0.0
        total += self.model.constant + float(self._minima(self.remainders(direction)).sum())
        return total if np.isfinite(total) else np.inf

    def shares(self) -> FloatArray:
        """What each node gives to each edge that leaves it, (states,)."""
        return np.floor(self.weights[:-1] * self._share)

    def remainders(self, direction: int) -> FloatArray:
        """What nodes keep after giving to the edges that leave them in this direction, (states,)."""
        return self.weights[:-1] - self._out[direction] * self.shares()

    def decode(self, direction: int) -> IntArray | None:
        """Choices made in node order, each conditioned on those before and on messages for those to come."""
        rest = self.weights.copy()
        np.subtract.at(rest, self._arrivals(direction), self.messages[direction][:-1])
        choices = np.zeros(len(self.model), dtype=np.int64)
        for level in self.levels[direction]:
            local = rest[level.states]
            choices[level.nodes] = local.argmin(axis=1)
            if np.isinf(local.min(axis=1)).any():
                return None
            for group in level.groups:
                state = choices[self._senders(group, direction)]
                np.add.at(rest, group.target, group.table[np.arange(len(state)), state])
        return choices

    def slack_tables(self, direction: int) -> Iterator[tuple[Pair, FloatArray]]:
        """After a sweep: per edge (i, j) its nonnegative slack (k_i, k_j) once the sender's share is added."""
        shares = self.shares()
        for index, (i, j) in enumerate(self.pairs):
            table = self.model.edges[i, j] - self.message(1, index)[:, None] - self.message(0, index)
            sender = self.states(i if direction == 0 else j)
            table += shares[sender][:, None] if direction == 0 else shares[sender]
            least = table.min()
            yield (i, j), table - least if np.isfinite(least) else table

    def message(self, direction: int, index: int) -> FloatArray:
        """The message of one edge: to its second node in direction 0, to its first in direction 1."""
        start = self.starts[direction]
        return self.messages[direction][start[index] : start[index + 1]]

    def states(self, node: int) -> slice:
        """Positions of a node's states."""
        return slice(int(self.offset[node]), int(self.offset[node + 1]))

    def _minima(self, values: FloatArray) -> FloatArray:
        return np.minimum.reduceat(values, self.offset[:-1]) if len(self.model) else values

    def _arrivals(self, direction: int) -> IntArray:
        """Position of the state that each message entry of a direction is sent to."""
        receivers = np.asarray([pair[1 - direction] for pair in self.pairs], dtype=np.int64)
        lengths = np.diff(self.starts[direction])
        within = np.arange(int(lengths.sum())) - np.repeat(self.starts[direction][:-1], lengths)
        return np.repeat(self.offset[receivers], lengths) + within

    def _senders(self, group: Group, direction: int) -> IntArray:
        return np.asarray([self.pairs[e][direction] for e in group.edges], dtype=np.int64)

    def _build(self, direction: int, order: IntArray) -> list[Level]:
        """Levels in the order of the sweep, with their edges grouped by similar shape."""
        leaving: dict[int, list[int]] = {}
        for index, pair in enumerate(self.pairs):
            leaving.setdefault(int(order[pair[direction]]), []).append(index)
        members: dict[int, list[int]] = {}
        for node, level in enumerate(order):
            members.setdefault(int(level), []).append(node)
        return [self._level(members[level], leaving.get(level, []), direction) for level in sorted(members)]

    def _level(self, nodes: list[int], edges: list[int], direction: int) -> Level:
        size = self._sizes
        shape = {e: (size[self.pairs[e][direction]], size[self.pairs[e][1 - direction]]) for e in edges}
        groups = [self._group(part, direction) for part in _similar(sorted(edges, key=lambda e: (shape[e], e)), shape)]
        width = max(size[node] for node in nodes)
        return Level(np.asarray(nodes), self._positions(self.offset, nodes, width), groups)

    def _group(self, edges: list[int], direction: int) -> Group:
        senders = [self.pairs[e][direction] for e in edges]
        receivers = [self.pairs[e][1 - direction] for e in edges]
        tables = [self.model.edges[self.pairs[e]] for e in edges]
        tables = [t if direction == 0 else t.T for t in tables]
        a, b = max(t.shape[0] for t in tables), max(t.shape[1] for t in tables)
        table = np.full((len(edges), a, b), np.inf)
        for row, t in enumerate(tables):
            table[row, : t.shape[0], : t.shape[1]] = t
        return Group(
            np.asarray(edges, dtype=np.int64),
            table,
            self._positions(self.offset, senders, a),
            self._positions(self.offset, receivers, b),
            (1.0 / self.chains[senders])[:, None],
            self._positions(self.starts[1 - direction], edges, a),
            self._positions(self.starts[direction], edges, b),
        )

    @staticmethod
    def _positions(starts: IntArray, items: list[int], width: int) -> IntArray:
        """Positions (n, width) of the entries of each item, the last position of all where padded."""
        index = np.asarray(items, dtype=np.int64)
        positions = starts[index][:, None] + np.arange(width)
        return np.where(positions < starts[index + 1][:, None], positions, starts[-1])


def _levels(count: int, pairs: list[Pair]) -> IntArray:
    """Longest path to each node over edges from lower to higher index."""
    level = np.zeros(count, dtype=np.int64).tolist()
    for i, j in sorted(pairs):
        level[j] = max(level[j], level[i] + 1)
    return np.asarray(level, dtype=np.int64)


def _similar(edges: list[int], shape: dict[int, Pair]) -> Iterator[list[int]]:
    """Split edges sorted by shape where padding them to one shape would waste too much."""
    group: list[int] = []
    rows = columns = area = 0
    for edge in edges:
        a, b = max(rows, shape[edge][0]), max(columns, shape[edge][1])
        size = area + shape[edge][0] * shape[edge][1]
        if group and a * b * (len(group) + 1) - size > PADDING_WASTE:
            yield group
            group, size, (a, b) = [], shape[edge][0] * shape[edge][1], shape[edge]
        group.append(edge)
        rows, columns, area = a, b, size
    if group:
        yield group
