"""The loops of message passing, over links as flat arrays; what they mean stands in `sweeps` and `pruning`.

Costs are integers in float64 (`inf` where forbidden): sums are exact, so the order of a loop changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .arrays import FloatArray, IntArray
from .compiled import compiled
from .transfers import Flat


class Wiring(NamedTuple):
    """Links of n nodes, L of them. *End* 0 of a link is its first node (rows of its table), end 1 its second.

    Direction 0 runs in node order and sends from end 0 to end 1, direction 1 the other way.
    """

    offset: IntArray  # (n + 1,) where each node's states begin
    ends: IntArray  # (2, L) nodes
    sizes: IntArray  # (2, L) classes of each end
    table: IntArray  # (L + 1,) where each table begins in the values, row by row
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
            for a in rows_left[:height]:
                for b in columns_left[:width]:
                    value = values[table + a * columns + b]
                    if direction == 0:
                        message[b] = min(message[b], value + given[a])
                    else:
                        message[a] = min(message[a], value + given[b])
            if direction == 1 and wiring.shared[link]:
                for cell in range(table, table + rows * columns):
                    slack[cell] = np.inf
                for a in rows_left[:height]:
                    for b in columns_left[:width]:
                        cell = table + a * columns + b
                        slack[cell] = values[cell] + given[b] - message[a] if values[cell] < np.inf else np.inf
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


class Sharing(NamedTuple):
    """The prices that readers share: S transfers with K links in all. A *slot* is a price, (given, layout) of one transfer; its
    *cells* are what the links of the readers that may want the layout have of it."""

    first: IntArray  # (S + 1,) where the links of each transfer begin
    link: IntArray  # (K,) indexes of links
    start: IntArray  # (K,) where their tables begin in the values
    across: IntArray  # (K,) 1 where the rows of the table are the wanted layouts, not the given ones
    wanted: IntArray  # (K,) wanted layouts that occur
    given: IntArray  # (S,) given layouts that occur
    width: IntArray  # (S,) layouts
    column: IntArray  # link by link and layout by layout: its place among those wanted, -1 where it does not occur
    column_start: IntArray  # (K + 1,)


class Priced(NamedTuple):
    """What a unit of each use of transfers costs, U of them, now and before."""

    first: IntArray  # (T + 1,) where the uses of each transfer begin
    amounts: Flat  # of U transfers whose prices are the amounts
    rates: FloatArray  # (U,)
    before: FloatArray  # (U,)


@compiled
def cells_of(sharing: Sharing, transfer: int, given: int, layout: int, cells: IntArray) -> int:
    """Fills in the cells of a slot; how many there are."""
    count = 0
    for k in range(sharing.first[transfer], sharing.first[transfer + 1]):
        column = sharing.column[sharing.column_start[k] + layout]
        if column >= 0:
            inside = column * sharing.given[transfer] + given if sharing.across[k] else given * sharing.wanted[k] + column
            cells[count] = sharing.start[k] + inside
            count += 1
    return count


@compiled
def rebalance(values: FloatArray, slack: FloatArray, sharing: Sharing) -> None:
    """Take what the cells of each slot can spare, and share it out evenly, the odd rest to the first.

    A cell with `inf` to spare needs nothing, and gets nothing where others do.
    """
    cells = np.empty(len(sharing.link) + 1, dtype=np.int64)
    for transfer in range(len(sharing.given)):
        for given in range(sharing.given[transfer]):
            for layout in range(sharing.width[transfer]):
                count = cells_of(sharing, transfer, given, layout, cells)
                if count == 0:
                    continue
                pool, needy, chosen = 0.0, 0, 0
                for k in range(count):
                    cell = cells[k]
                    if slack[cell] < np.inf:
                        needy += 1
                        chosen = k if needy == 1 else chosen
                    if values[cell] < np.inf:
                        spare = min(values[cell], slack[cell])
                        pool += spare
                        values[cell] -= spare
                each = np.floor(pool / max(1, needy))
                for k in range(count):
                    if slack[cells[k]] < np.inf:
                        values[cells[k]] += each
                        pool -= each
                values[cells[chosen]] += pool


@compiled
def reprice(values: FloatArray, sharing: Sharing, layouts: IntArray, layout_start: IntArray, prices: Flat, priced: Priced) -> None:
    """Make the cells of each slot add up to its price with what its uses cost at other rates: a rise is shared evenly, a fall taken in
    proportion, the odd rest goes to the first.

    sharing: of all transfers. layouts: the given layouts that occur, transfer by transfer at `layout_start`; `prices` without uses.
    """
    cells = np.empty(len(sharing.link) + 1, dtype=np.int64)
    for transfer in range(len(sharing.given)):
        changed = False
        for use in range(priced.first[transfer], priced.first[transfer + 1]):
            changed = changed or priced.rates[use] != priced.before[use]
        if not changed:
            continue
        width = sharing.width[transfer]
        for given in range(sharing.given[transfer]):
            row = layouts[layout_start[transfer] + given] * width
            for layout in range(width):
                price = prices.prices[prices.price_start[transfer] + row + layout]
                if price == np.inf:
                    continue
                more = 0.0
                for use in range(priced.first[transfer], priced.first[transfer + 1]):
                    more += priced.amounts.prices[priced.amounts.price_start[use] + row + layout] * priced.rates[use]
                price += np.floor(more * (1 - 2.0**-50))  # each product may have been rounded up
                count = cells_of(sharing, transfer, given, layout, cells)
                before = 0.0
                for k in range(count):
                    before += values[cells[k]]
                if count == 0 or before == price:
                    continue
                change = price - before
                for k in range(count):
                    cell = cells[k]
                    values[cell] += np.floor(change / count) if change >= 0 else -np.floor(values[cell] * (-change / before))
                rest = price
                for k in range(count):
                    rest -= values[cells[k]]
                for k in range(count):
                    part = max(rest, -values[cells[k]])
                    values[cells[k]] += part
                    rest -= part


@compiled
def slacks(
    wiring: Wiring,
    values: FloatArray,
    weights: FloatArray,
    forward: FloatArray,
    backward: FloatArray,
    share: FloatArray,
    tables: FloatArray,
) -> FloatArray:
    """After a sweep of direction 1: fills in what each table has left, and returns what the states keep, (states,)."""
    kept = weights[: wiring.offset[-1]].copy()
    width = 1 if not len(wiring.ends[0]) else wiring.sizes.max()
    given, left = np.empty(width), np.empty(width)
    for link in range(len(wiring.shared)):
        left_by_class(wiring, weights, link, 0, left)
        sender, rows, columns = wiring.ends[1, link], wiring.sizes[0, link], wiring.sizes[1, link]
        classes = wiring.start[1, link] - wiring.offset[sender]
        for b in range(columns):
            given[b] = np.inf
        for state in range(wiring.offset[sender], wiring.offset[sender + 1]):
            b = wiring.classes[classes + state]
            given[b] = min(given[b], np.floor(weights[state] * share[sender]))
        for state in range(wiring.offset[sender], wiring.offset[sender + 1]):
            if kept[state] < np.inf:
                kept[state] -= given[wiring.classes[classes + state]]
        for a in range(rows):
            for b in range(columns):
                cell = wiring.table[link] + a * columns + b
                moved = backward[wiring.message[1, link] + a] + forward[wiring.message[0, link] + b]
                tables[cell] = values[cell] - moved + given[b] + left[a]
    return kept


@compiled
def collect(wiring: Wiring, tables: FloatArray, kept: FloatArray, chains: FloatArray, arrived: FloatArray) -> FloatArray:
    """What each state costs at least, (states,), in node order; `arrived` (as messages of direction 0): what came over each link."""
    excess = kept.copy()
    given = np.empty(1 if not len(wiring.ends[0]) else wiring.sizes.max())
    for node in range(len(wiring.offset) - 1):
        for position in range(wiring.first[0, node], wiring.first[0, node + 1]):
            link = wiring.leaving[0, position]
            rows, columns = wiring.sizes[0, link], wiring.sizes[1, link]
            least_by_class(wiring, excess, link, 0, chains[node], given)
            arriving = wiring.message[0, link]
            for b in range(columns):
                arrived[arriving + b] = np.inf
            for a in range(rows):
                for b in range(columns):
                    value = given[a] + tables[wiring.table[link] + a * columns + b]
                    arrived[arriving + b] = min(arrived[arriving + b], value)
            receiver = wiring.ends[1, link]
            classes = wiring.start[1, link] - wiring.offset[receiver]
            for state in range(wiring.offset[receiver], wiring.offset[receiver + 1]):
                excess[state] += arrived[arriving + wiring.classes[classes + state]]
    return excess


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
                cell = wiring.table[link] + a * columns + b
                if whole[a] + tables[cell] >= room or part[a] + tables[cell] + others[b] >= room:
                    tables[cell] = np.inf
