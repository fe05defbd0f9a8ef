"""Compiled loops that split the prices of transfers between readers; `links` explains the splits.

Prices are integers in float64 (`inf` where forbidden): sums are exact, whatever the order of a loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.transfers import Flat


class Sharing(NamedTuple):
    """Prices shared by readers: S transfers with K links in all. A *slot* is one price, (given, layout) of one transfer. Its *cells* are
    the table entries that add up to it, one per link of a reader that can want the layout."""

    first: IntArray  # (S + 1,) where the links of each transfer begin
    link: IntArray  # (K,) indexes of links
    start: IntArray  # (K,) where their tables begin in the values
    across: IntArray  # (K,) 1 where the rows of the table are the wanted layouts, not the given ones
    wanted: IntArray  # (K,) number of wanted layouts that occur
    given: IntArray  # (S,) number of given layouts that occur
    width: IntArray  # (S,) number of layouts
    column: IntArray  # per link and layout: the layout's index among those wanted, -1 where it does not occur
    column_start: IntArray  # (K + 1,)


class Priced(NamedTuple):
    """The rates (cost per unit) of U uses of transfers, now and before."""

    first: IntArray  # (T + 1,) where the uses of each transfer begin
    amounts: Flat  # of U transfers whose prices are the amounts
    rates: FloatArray  # (U,)
    before: FloatArray  # (U,)


@compiled
def cells_of(sharing: Sharing, transfer: int, given: int, layout: int, cells: IntArray) -> int:
    """Write the cells of a slot into `cells`; returns their number."""
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
    """Collect the slack of the cells of each slot and redistribute it evenly among the *needy* cells, those whose slack is finite.

    The first needy cell gets the remainder. If no cell is needy, the first cell gets everything. All slots of a given layout are processed
    together, reader by reader, in the order of the tables in memory.
    """
    room = 1 if not len(sharing.width) else sharing.width.max()
    pool, needy, chosen, each = np.empty(room), np.empty(room), np.empty(room), np.empty(room)
    for transfer in range(len(sharing.given)):
        width, height = sharing.width[transfer], sharing.given[transfer]
        first, last = sharing.first[transfer], sharing.first[transfer + 1]
        for given in range(height):
            for layout in range(width):
                pool[layout], needy[layout], chosen[layout] = 0.0, 0.0, -1.0
            for k in range(first, last):
                begin = sharing.start[k] + (given if sharing.across[k] else given * sharing.wanted[k])
                step = height if sharing.across[k] else 1
                columns = sharing.column[sharing.column_start[k] : sharing.column_start[k] + width]
                take(values[begin:], slack[begin:], step, columns, k, pool, needy, chosen)
            for layout in range(width):
                each[layout] = np.floor(pool[layout] / max(1.0, needy[layout]))
                pool[layout] -= each[layout] * needy[layout]
            for k in range(first, last):
                begin = sharing.start[k] + (given if sharing.across[k] else given * sharing.wanted[k])
                step = height if sharing.across[k] else 1
                columns = sharing.column[sharing.column_start[k] : sharing.column_start[k] + width]
                give(values[begin:], slack[begin:], step, columns, k, each, pool, chosen)


@compiled
def take(
    row: FloatArray, slack: FloatArray, step: int, columns: IntArray, k: int, pool: FloatArray, needy: FloatArray, chosen: FloatArray
) -> None:
    """Move the slack of a reader's cells into the pools of their layouts; the cells are `step` apart in `row`, in column order."""
    for layout in range(len(columns)):
        if columns[layout] >= 0:
            cell = step * columns[layout]
            value, spare = row[cell], slack[cell]
            needy[layout] += spare < np.inf
            if chosen[layout] < 0 or (spare < np.inf and needy[layout] == 1):
                chosen[layout] = k
            taken = min(value, spare) if value < np.inf else 0.0
            pool[layout] += taken
            row[cell] = value - taken


@compiled
def give(
    row: FloatArray, slack: FloatArray, step: int, columns: IntArray, k: int, each: FloatArray, rest: FloatArray, chosen: FloatArray
) -> None:
    """Add to the needy cells of a reader their equal part, and the remainder where this reader was chosen for it."""
    for layout in range(len(columns)):
        if columns[layout] >= 0:
            cell = step * columns[layout]
            part = each[layout] if slack[cell] < np.inf else 0.0
            row[cell] += part + (rest[layout] if chosen[layout] == k else 0.0)


@compiled
def reprice(values: FloatArray, sharing: Sharing, layouts: IntArray, layout_start: IntArray, prices: Flat, priced: Priced) -> None:
    """Update the cells of each slot for new rates, so that they add up to the price plus the cost of its uses.

    A rise is shared evenly, a fall in proportion to the cells; the first cell takes the remainder.
    sharing: of all transfers. layouts: the given layouts that occur, per transfer from `layout_start` on. prices: without uses.
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
