"""Compiled loops of message passing over links as flat arrays; `sweeps` and `pruning` explain the method.

Costs are integers in float64 (`inf` where forbidden): sums are exact, whatever the order of a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.problem.arrays import BoolArray, FloatArray, IntArray

DENSE = 3
"""If at least a third of the columns are left, reading all of them contiguously is no slower than reading those by index."""


class Wiring(NamedTuple):
    """L links of n nodes. *End* 0 of a link is its first node (the rows of its table), end 1 its second.

    Direction 0 runs in node order and sends from end 0 to end 1; direction 1 is the reverse.
    """

    offset: IntArray  # (n + 1,) where each node's states begin
    ends: IntArray  # (2, L) nodes
    sizes: IntArray  # (2, L) classes of each end
    table: IntArray  # (L,) where each table begins in the values, row by row; several links may have one table
    own: IntArray  # (L + 1,) where each table begins in arrays with a separate table per link
    classes: IntArray  # the class of each state, link by link and end by end
    start: IntArray  # (2, L) where in `classes` an end begins
    message: IntArray  # (2, L + 1) where the message of a direction begins: one number per class of its receiver
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
    """Update all messages of a direction; returns (the bound without the constant, the number of states and pairs read or skipped).

    Direction 1 also computes the slack of split tables. Pairs of classes without an allowed state are skipped.
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
            read += 2 * (high - low + wiring.offset[other + 1] - wiring.offset[other])  # skipping states takes time too
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
    """Lower the message to the columns by one row of a table plus what its sender gives; dense: all columns, not only those left."""
    if dense:
        for b in range(len(row)):
            message[b] = min(message[b], row[b] + given)
    else:
        for b in left:
            message[b] = min(message[b], row[b] + given)


@compiled
def backward_row(row: FloatArray, given: FloatArray, left: IntArray, dense: bool) -> float:
    """The least entry of a row plus what its column gives, `inf` where no columns are left."""
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
    """Set slack to how much cheaper each pair of a row could be without lowering the message; all `inf` where the message is `inf`."""
    if message == np.inf:
        for b in range(len(row)):
            slack[b] = np.inf
    else:
        for b in range(len(row)):
            slack[b] = row[b] + given[b] - message


@compiled
def left_by_class(wiring: Wiring, weights: FloatArray, link: int, end: int, left: FloatArray) -> None:
    """Set left to 0 for the classes of a link's end with an allowed state, to `inf` for the others."""
    node = wiring.ends[end, link]
    for k in range(wiring.sizes[end, link]):
        left[k] = np.inf
    classes = wiring.start[end, link] - wiring.offset[node]
    for state in range(wiring.offset[node], wiring.offset[node + 1]):
        if weights[state] < np.inf:
            left[wiring.classes[classes + state]] = 0.0


@compiled
def indices_left(values: FloatArray, count: int, indices: IntArray) -> int:
    """Write the indices of the finite ones among the first `count` values; returns their number."""
    found = 0
    for k in range(count):
        if values[k] < np.inf:
            indices[found] = k
            found += 1
    return found


@compiled
def decode(
    wiring: Wiring, direction: int, values: FloatArray, weights: FloatArray, messages: FloatArray, choices: IntArray, consistent: bool
) -> bool:
    """Choose a state node by node in a direction, by its messages; whether every node had an allowed state.

    consistent: whether a node loses the states that have no partner left at a neighbour, directly or through others (arc consistency), so
    that a choice seldom leaves a later node without any. That is slower.
    """
    rest = weights.copy()
    for link in range(len(wiring.shared)):
        receiver, arriving = wiring.ends[1 - direction, link], wiring.message[direction, link]
        classes = wiring.start[1 - direction, link] - wiring.offset[receiver]
        for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
            rest[state] -= messages[arriving + wiring.classes[classes + state]]
    count = len(wiring.offset) - 1
    chosen, waits = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    waiting = np.empty(count, dtype=np.int64)
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
        chosen[node] = True
        if consistent:
            for state in range(low, high):
                rest[state] = rest[state] if state == best else np.inf
            waiting[0], queued = node, 1
            while queued:
                queued -= 1
                waits[waiting[queued]] = False
                queued = _forbid_around(wiring, values, waiting[queued], rest, chosen, waits, waiting, queued)
        for position in range(wiring.first[direction, node], wiring.first[direction, node + 1]):
            link = wiring.leaving[direction, position]
            own = wiring.classes[wiring.start[direction, link] + best - low]
            receiver, columns, table = wiring.ends[1 - direction, link], wiring.sizes[1, link], wiring.table[link]
            classes = wiring.start[1 - direction, link] - wiring.offset[receiver]
            for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
                k = wiring.classes[classes + state]
                rest[state] += values[table + (own * columns + k if direction == 0 else k * columns + own)]
    return True


@compiled
def _forbid_around(
    wiring: Wiring, values: FloatArray, node: int, rest: FloatArray, chosen: BoolArray, waits: BoolArray, waiting: IntArray, queued: int
) -> int:
    """Forbid the states of neighbours that go with no allowed state of the node; rest: (states,) their costs.

    Neighbours that lose states are appended to `waiting`, the first `queued` entries of which are nodes to look at; returns their number.
    """
    low, high = wiring.offset[node], wiring.offset[node + 1]
    for direction in range(2):
        for position in range(wiring.first[direction, node], wiring.first[direction, node + 1]):
            link = wiring.leaving[direction, position]
            receiver = wiring.ends[1 - direction, link]
            if chosen[receiver]:
                continue
            columns, table, own = wiring.sizes[1, link], wiring.table[link], wiring.start[direction, link] - low
            classes, lost = wiring.start[1 - direction, link] - wiring.offset[receiver], False
            for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
                if rest[state] == np.inf:
                    continue
                k, partner = wiring.classes[classes + state], low
                while partner < high:
                    if rest[partner] < np.inf:
                        c = wiring.classes[own + partner]
                        if values[table + (c * columns + k if direction == 0 else k * columns + c)] < np.inf:
                            break
                    partner += 1
                if partner == high:
                    rest[state], lost = np.inf, True
            if lost and not waits[receiver]:
                waits[receiver] = True
                waiting[queued] = receiver
                queued += 1
    return queued


class Messages(NamedTuple):
    """The state of message passing."""

    values: FloatArray  # the tables
    weights: FloatArray  # (states,)
    forward: FloatArray  # of direction 0
    backward: FloatArray
    share: FloatArray  # (n,) fraction of its weights that a node gives each chain


@compiled
def link_slacks(wiring: Wiring, link: int, at: Messages, given: FloatArray, left: FloatArray, table: FloatArray) -> float:
    """After a sweep of direction 1: set table to the reparameterised table of a link, row by row; returns its least entry.

    given, left: buffers with one number per class; given holds afterwards what the sender gave.
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
    """After a sweep of direction 1: set least to the least entry of each reparameterised table; returns the states' own costs, (states,).

    tables: set to all reparameterised tables, one per link; or a buffer of the size of the largest table.
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
    """(states,) the least cost of each state, accumulated in node order. arrived: set to what each link contributes, as messages."""
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
    """As `collect`, but computes each table, less its least entry, when needed; large models take a third of the memory."""
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
    """Set came to what a link contributes to each class of its receiver, and add it to the receiver's states. given: by sender class."""
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
    """Set least to the least of floor(values / parts) over the states of each class of a link's end; values: (states,)."""
    node = wiring.ends[end, link]
    for k in range(wiring.sizes[end, link]):
        least[k] = np.inf
    classes = wiring.start[end, link] - wiring.offset[node]
    for state in range(wiring.offset[node], wiring.offset[node + 1]):
        k = wiring.classes[classes + state]
        least[k] = min(least[k], np.floor(values[state] / parts))


@compiled
def forbid_pairs(wiring: Wiring, tables: FloatArray, excess: FloatArray, arrived: FloatArray, chains: FloatArray, room: float) -> None:
    """Set to `inf` each pair whose least cost above the bound reaches the room.

    Two sums bound it from below: the slack of the pair and the whole excess of its first state; or the slack, the first state's share of
    its excess, and the excess of the second state without what this link contributed.
    """
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
