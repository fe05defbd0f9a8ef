"""The loops of local search over all single changes of a plan, compiled."""

from __future__ import annotations

import numpy as np

from .arrays import FloatArray, IntArray
from .compiled import compiled
from .uses import FlatUses


@compiled
def best_move(local: FloatArray, offset: IntArray, choices: IntArray, uses: FlatUses, room: FloatArray, witness: IntArray) -> int:
    """Where in the states (states,) the change is that saves most and still fits in the room (rows,); -1 where none saves anything.

    witness: (states,) a row that a change did not fit in when it was last looked at, or -1; looked at first, and renewed.
    """
    best, found = 0.0, -1
    for node in range(len(choices)):
        now = offset[node] + choices[node]
        for position in range(offset[node], offset[node + 1]):
            change = local[position] - local[now]
            if change < best:
                state = position - offset[node]
                row = witness[position]
                if row < 0 or room[row] >= more(node, state, choices[node], row, uses):
                    witness[position] = row = fullest(node, state, choices[node], uses, room)
                if row < 0:
                    best, found = change, position
    return found


@compiled
def more(node: int, state: int, now: int, row: int, uses: FlatUses) -> float:
    """Bytes that a node uses more in a row in one state than in another."""
    total = 0.0
    for use in range(uses.first[node], uses.first[node + 1]):
        if uses.lo[use] <= row < uses.hi[use]:
            total += uses.amount[uses.start[use] + state] - uses.amount[uses.start[use] + now]
    return total


@compiled
def fullest(node: int, state: int, now: int, uses: FlatUses, room: FloatArray) -> int:
    """The row that a change overfills most, -1 where it overfills none."""
    begin, end = uses.first[node], uses.first[node + 1]
    if begin == end:
        return -1
    low, high = uses.lo[begin:end].min(), uses.hi[begin:end].max()
    left = room[low:high].copy()
    for use in range(begin, end):
        amount = uses.amount[uses.start[use] + state] - uses.amount[uses.start[use] + now]
        left[uses.lo[use] - low : uses.hi[use] - low] -= amount
    row = left.argmin()
    return low + row if left[row] < 0 else -1


@compiled
def cheapest_relief(
    row: int, need: float, local: FloatArray, offset: IntArray, choices: IntArray, uses: FlatUses, freed: FloatArray
) -> int:
    """Where in the states the change is that costs least per byte freed in a row, of `need` bytes at most; -1 where none is allowed.

    freed: (states,) bytes that each change frees beside the uses of its node, or (0,) where there are none.
    """
    best, found = np.inf, -1
    for node in range(len(choices)):
        begin, end = uses.first[node], uses.first[node + 1]
        live = len(freed) > 0
        for use in range(begin, end):
            live = live or uses.lo[use] <= row < uses.hi[use]
        if not live:
            continue
        now = choices[node]
        for position in range(offset[node], offset[node + 1]):
            saved = freed[position] if len(freed) else 0.0
            saved -= more(node, position - offset[node], now, row, uses)
            if saved > 0:
                rate = (local[position] - local[offset[node] + now]) / min(saved, need)
                if rate < best:
                    best, found = rate, position
    return found
