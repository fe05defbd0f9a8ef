"""The loops of message passing, over links as flat arrays; what they mean stands in `sweeps` and `pruning`.

Costs are integers in float64 (`inf` where forbidden): sums are exact, so the order of a loop changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.compiled import compiled

DENSE = 3
"""Part of the columns (a third) of which enough are left that reading all of them in turn is no slower."""


class Wiring(NamedTuple):
    """Links of n nodes, L of them. *End* 0 of a link is its first node (rows of its table), end 1 its second.

    Direction 0 runs in node order and sends from end 0 to end 1, direction 1 the other way.
    """

    offset: IntArray  # (n + 1,) where each node's states begin
    ends: IntArray  # (2, L) nodes
    sizes: IntArray  # (2, L) classes of each end
    table: IntArray  # (L,) where each table begins in the values, row by row; several links may have one table
    own: IntArray  # (L + 1,) where it would if each link had its own
    classes: IntArray  # the class of each state, link by link and end by end
    start: IntArray  # (2, L) where in them an end begins
    message: IntArray  # (2, L + 1) where the message of a direction begins: a number per class of its receiver
    first: IntArray  # (2, n + 1) where in `leaving` the links that a node sends over begin
    leaving: IntArray  # (2, L) links by sender
    shared: IntArray  # (L,) 1 where the table is a split of shared prices


@compiled
def sweep(
    wiring: Wiring,
    direction: int,
    values: FloatArray,
    weights: FloatArray,
    sent: FloatArray,
    back: FloatArray,
    share: FloatArray,
    cap: float,
    slack: FloatArray,
) -> tuple[float, int]:
    """Send all messages of a direction: (the bound without the constant, how many states and pairs were read or passed over).

    Direction 1 fills in the slack of split tables. Work goes with the pairs of classes that still have a state: the others are passed over.
    """
    count = len(wiring.offset) - 1
    total, read = 0.0, 0
    room = 1 if not len(wiring.ends[0]) else wiring.sizes.max()
    message, given = np.empty(room), np.empty(room)
    rows_left, columns_left = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64)
    for step in range(count):
        node = step if direction == 0 else count - 1 - step
        low, high = wiring.offset[node], wiring.offset[node + 1]
        begin, end = wiring.first[direction, node], wiring.first[direction, node + 1]
        least = np.inf
        for state in range(low, high):
            if weights[state] < np.inf:
                read += 1
                least = min(least, weights[state] - (end - begin) * np.floor(weights[state] * share[node]))
        total += least
        for position in range(begin, end):
            link = wiring.leaving[direction, position]
            rows, columns = wiring.sizes[0, link], wiring.sizes[1, link]
            senders, receivers = (rows, columns) if direction == 0 else (columns, rows)
            table = wiring.table[link]
            for k in range(senders):
                given[k] = np.inf
            classes = wiring.start[direction, link]
            other = wiring.ends[1 - direction, link]
            read += 2 * (high - low + wiring.offset[other + 1] - wiring.offset[other])  # passing over states takes time too
            for state in range(low, high):
                k = wiring.classes[classes + state - low]
                given[k] = min(given[k], np.floor(weights[state] * share[node]))
            returned = wiring.message[1 - direction, link]
            for k in range(senders):
                given[k] -= back[returned + k]
            left_by_class(wiring, weights, link, 1 - direction, message)
            height = indices_left(given if direction == 0 else message, rows, rows_left)
            width = indices_left(message if direction == 0 else given, columns, columns_left)
            read += height * width
            for k in range(receivers):
                message[k] = np.inf
            dense = DENSE * width >= columns
            for a in rows_left[:height]:
                row = values[table + a * columns : table + (a + 1) * columns]
                if direction == 0:
                    forward_row(row, given[a], message, columns_left[:width], dense)
                else:
                    message[a] = backward_row(row, given, columns_left[:width], dense)
            if direction == 0 and dense and width < columns:
                left_by_class(wiring, weights, link, 1, given)
                for b in range(columns):
                    message[b] += given[b]
            if direction == 1 and wiring.shared[link]:
                for a in range(rows):
                    begin_row, end_row = table + a * columns, table + (a + 1) * columns
                    spare_row(values[begin_row:end_row], given, message[a], slack[begin_row:end_row])
            least = np.inf
            for k in range(receivers):
                least = min(least, message[k])
            if least == np.inf:
                return np.inf, read
            total += least
            arriving = wiring.message[direction, link]
            for k in range(receivers):
                message[k] = min(message[k] - least, cap)
            classes = wiring.start[1 - direction, link] - wiring.offset[other]
            for state in range(wiring.offset[other], wiring.offset[other + 1]):
                k = wiring.classes[classes + state]
                weights[state] += message[k] - sent[arriving + k]
            for k in range(receivers):
                sent[arriving + k] = message[k]
    return total, read


@compiled
def forward_row(row: FloatArray, given: float, message: FloatArray, left: IntArray, dense: bool) -> None:
    """Lower what arrives at the columns (at least those left) to a row of a table with what its sender gives."""
    if dense:
        for b in range(len(row)):
            message[b] = min(message[b], row[b] + given)
    else:
        for b in left:
            message[b] = min(message[b], row[b] + given)


@compiled
def backward_row(row: FloatArray, given: FloatArray, left: IntArray, dense: bool) -> float:
    """The least of a row of a table with what the columns give, `inf` where none are left."""
    least = np.inf
    if dense:
        for b in range(len(row)):
            least = min(least, row[b] + given[b])
    else:
        for b in left:
            least = min(least, row[b] + given[b])
    return least


@compiled
def spare_row(row: FloatArray, given: FloatArray, message: float, slack: FloatArray) -> None:
    """What the pairs of a row could cost less without harm to the message, `inf` where they are forbidden."""
    if message == np.inf:
        for b in range(len(row)):
            slack[b] = np.inf
    else:
        for b in range(len(row)):
            slack[b] = row[b] + given[b] - message


@compiled
def left_by_class(wiring: Wiring, weights: FloatArray, link: int, end: int, left: FloatArray) -> None:
    """0 for the classes of a link's end that still have a state, `inf` for the others."""
    node = wiring.ends[end, link]
    for k in range(wiring.sizes[end, link]):
        left[k] = np.inf
    classes = wiring.start[end, link] - wiring.offset[node]
    for state in range(wiring.offset[node], wiring.offset[node + 1]):
        if weights[state] < np.inf:
            left[wiring.classes[classes + state]] = 0.0


@compiled
def indices_left(values: FloatArray, count: int, indices: IntArray) -> int:
    """Fills in which of the first values are finite; how many are."""
    found = 0
    for k in range(count):
        if values[k] < np.inf:
            indices[found] = k
            found += 1
    return found


@compiled
def decode(wiring: Wiring, direction: int, values: FloatArray, weights: FloatArray, messages: FloatArray, choices: IntArray) -> bool:
    """Choose node by node in a direction, given its messages; whether every node had a state that is allowed."""
    rest = weights.copy()
    for link in range(len(wiring.shared)):
        receiver, arriving = wiring.ends[1 - direction, link], wiring.message[direction, link]
        classes = wiring.start[1 - direction, link] - wiring.offset[receiver]
        for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
            rest[state] -= messages[arriving + wiring.classes[classes + state]]
    count = len(wiring.offset) - 1
    for step in range(count):
        node = step if direction == 0 else count - 1 - step
        low, high = wiring.offset[node], wiring.offset[node + 1]
        best = low
        for state in range(low + 1, high):
            if rest[state] < rest[best]:
                best = state
        if rest[best] == np.inf:
            return False
        choices[node] = best - low
        for position in range(wiring.first[direction, node], wiring.first[direction, node + 1]):
            link = wiring.leaving[direction, position]
            own = wiring.classes[wiring.start[direction, link] + best - low]
            receiver, columns, table = wiring.ends[1 - direction, link], wiring.sizes[1, link], wiring.table[link]
            classes = wiring.start[1 - direction, link] - wiring.offset[receiver]
            for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
                k = wiring.classes[classes + state]
                rest[state] += values[table + (own * columns + k if direction == 0 else k * columns + own)]
    return True


class Messages(NamedTuple):
    """Where message passing stands."""

    values: FloatArray  # the tables
    weights: FloatArray  # (states,)
    forward: FloatArray  # of direction 0
    backward: FloatArray
    share: FloatArray  # (n,) part of its weights that a node gives each chain


@compiled
def link_slacks(wiring: Wiring, link: int, at: Messages, given: FloatArray, left: FloatArray, table: FloatArray) -> float:
    """After a sweep of direction 1: fills in what the table of a link has left, row by row; the least of it.

    given, left: room for a number per class; afterwards the first holds what the sender gave.
    """
    left_by_class(wiring, at.weights, link, 0, left)
    sender, rows, columns = wiring.ends[1, link], wiring.sizes[0, link], wiring.sizes[1, link]
    classes = wiring.start[1, link] - wiring.offset[sender]
    for b in range(columns):
        given[b] = np.inf
    for state in range(wiring.offset[sender], wiring.offset[sender + 1]):
        b = wiring.classes[classes + state]
        given[b] = min(given[b], np.floor(at.weights[state] * at.share[sender]))
    values = at.values[wiring.table[link] : wiring.table[link] + rows * columns]
    forward = at.forward[wiring.message[0, link] : wiring.message[0, link] + columns]
    least = np.inf
    for a in range(rows):
        back = at.backward[wiring.message[1, link] + a] - left[a]
        for b in range(columns):
            table[a * columns + b] = values[a * columns + b] - (back + forward[b]) + given[b]
            least = min(least, table[a * columns + b])
    return least


@compiled
def slacks(wiring: Wiring, at: Messages, tables: FloatArray, least: FloatArray) -> FloatArray:
    """After a sweep of direction 1: fills in the least that each table has left, and returns what the states keep, (states,).

    tables: filled in with what each has left, the table of each link on its own; or room for the largest, and of no use afterwards.
    """
    kept = at.weights[: wiring.offset[-1]].copy()
    width = 1 if not len(wiring.ends[0]) else wiring.sizes.max()
    given, left = np.empty(width), np.empty(width)
    every = len(tables) == wiring.own[-1]
    for link in range(len(wiring.shared)):
        begin, end = (wiring.own[link], wiring.own[link + 1]) if every else (0, wiring.own[link + 1] - wiring.own[link])
        least[link] = link_slacks(wiring, link, at, given, left, tables[begin:end])
        sender = wiring.ends[1, link]
        classes = wiring.start[1, link] - wiring.offset[sender]
        for state in range(wiring.offset[sender], wiring.offset[sender + 1]):
            if kept[state] < np.inf:
                kept[state] -= given[wiring.classes[classes + state]]
    return kept


@compiled
def collect(wiring: Wiring, tables: FloatArray, kept: FloatArray, chains: FloatArray, arrived: FloatArray) -> FloatArray:
    """What each state costs at least, (states,), in node order; `arrived` (as messages of direction 0): what came over each link."""
    excess = kept.copy()
    given = np.empty(1 if not len(wiring.ends[0]) else wiring.sizes.max())
    for node in range(len(wiring.offset) - 1):
        for position in range(wiring.first[0, node], wiring.first[0, node + 1]):
            link = wiring.leaving[0, position]
            least_by_class(wiring, excess, link, 0, chains[node], given)
            came = arrived[wiring.message[0, link] : wiring.message[0, link + 1]]
            collect_link(wiring, link, tables[wiring.own[link] : wiring.own[link + 1]], given, came, excess)
    return excess


@compiled
def collect_brief(wiring: Wiring, at: Messages, least: FloatArray, kept: FloatArray, chains: FloatArray) -> FloatArray:
    """The same of tables that are made link by link, less the least of each: a third of the memory where a model is large."""
    excess = kept.copy()
    width = 1 if not len(wiring.ends[0]) else wiring.sizes.max()
    given, left, came = np.empty(width), np.empty(width), np.empty(width)
    table = np.empty((wiring.own[1:] - wiring.own[:-1]).max() if len(least) else 0)
    for node in range(len(wiring.offset) - 1):
        for position in range(wiring.first[0, node], wiring.first[0, node + 1]):
            link = wiring.leaving[0, position]
            size = wiring.own[link + 1] - wiring.own[link]
            link_slacks(wiring, link, at, given, left, table[:size])
            for cell in range(size):
                table[cell] -= least[link]
            least_by_class(wiring, excess, link, 0, chains[node], given)
            collect_link(wiring, link, table[:size], given, came[: wiring.sizes[1, link]], excess)
    return excess


@compiled
def collect_link(wiring: Wiring, link: int, table: FloatArray, given: FloatArray, came: FloatArray, excess: FloatArray) -> None:
    """Fills in what comes over a link where its sender gives so much by class, and adds it to its receiver's states."""
    rows, columns = wiring.sizes[0, link], wiring.sizes[1, link]
    for b in range(columns):
        came[b] = np.inf
    for a in range(rows):
        for b in range(columns):
            came[b] = min(came[b], given[a] + table[a * columns + b])
    receiver = wiring.ends[1, link]
    classes = wiring.start[1, link] - wiring.offset[receiver]
    for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
        excess[state] += came[wiring.classes[classes + state]]


@compiled
def least_by_class(wiring: Wiring, values: FloatArray, link: int, end: int, parts: float, least: FloatArray) -> None:
    """The least of each class of a link's end, of values (states,) divided into parts and rounded down."""
    node = wiring.ends[end, link]
    for k in range(wiring.sizes[end, link]):
        least[k] = np.inf
    classes = wiring.start[end, link] - wiring.offset[node]
    for state in range(wiring.offset[node], wiring.offset[node + 1]):
        k = wiring.classes[classes + state]
        least[k] = min(least[k], np.floor(values[state] / parts))


@compiled
def forbid_pairs(wiring: Wiring, tables: FloatArray, excess: FloatArray, arrived: FloatArray, chains: FloatArray, room: float) -> None:
    """`inf` where a pair's slack with the excess of its first state, or of all else at its second, fills the room."""
    width = 1 if not len(wiring.ends[0]) else wiring.sizes.max()
    part, whole, others = np.empty(width), np.empty(width), np.empty(width)
    for link in range(len(wiring.shared)):
        rows, columns = wiring.sizes[0, link], wiring.sizes[1, link]
        least_by_class(wiring, excess, link, 0, chains[wiring.ends[0, link]], part)
        least_by_class(wiring, excess, link, 0, 1.0, whole)
        least_by_class(wiring, excess, link, 1, 1.0, others)
        for b in range(columns):
            came = arrived[wiring.message[0, link] + b]
            others[b] = others[b] - came if others[b] < np.inf else np.inf
        for a in range(rows):
            for b in range(columns):
                cell = wiring.own[link] + a * columns + b
                if whole[a] + tables[cell] >= room or part[a] + tables[cell] + others[b] >= room:
                    tables[cell] = np.inf
