"""The loops of local search over all single changes of a plan, compiled."""

from __future__ import annotations

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.compiled import compiled
from fxshard.solver.problem.row_uses import MovedUses
from fxshard.solver.problem.transfers import paid
from fxshard.solver.problem.uses import FlatUses


@compiled
def best_move(
    local: FloatArray,
    offset: IntArray,
    choices: IntArray,
    uses: FlatUses,
    moved: MovedUses,
    room: FloatArray,
    witness: IntArray,
    seen: FloatArray,
) -> int:
    """Where in the states (states,) the change is that saves most and still fits in the room (rows,); -1 where none saves anything.

    witness, seen: (states,) a row that a change did not fit in when it was last looked at, or -1, and what room it had then: with no
    more than that it is passed over. Renewed; the caller takes out those of nodes whose uses have changed since.
    """
    best, found = 0.0, -1
    steps = np.zeros(len(room) + 1)
    for node in range(len(choices)):
        now = offset[node] + choices[node]
        for position in range(offset[node], offset[node + 1]):
            change = local[position] - local[now]
            row = witness[position]
            if change < best and (row < 0 or room[row] > seen[position]):
                low, high = shift(node, position - offset[node], choices, uses, moved, steps)
                witness[position] = row = overfilled(low, high, steps, room)
                if row < 0:
                    best, found = change, position
                else:
                    seen[position] = room[row]
                steps[low : high + 1] = 0.0
    return found


@compiled
def shift(node: int, state: int, choices: IntArray, uses: FlatUses, moved: MovedUses, steps: FloatArray) -> tuple[int, int]:
    """Adds to steps (rows + 1,), row by row the difference to the row before, what a change brings; the rows [low, high) that it is in."""
    low, high, now = len(steps) - 1, 0, choices[node]
    for use in range(uses.first[node], uses.first[node + 1]):
        change = uses.amount[uses.start[use] + state] - uses.amount[uses.start[use] + now]
        if change != 0.0:
            steps[uses.lo[use]] += change
            steps[uses.hi[use]] -= change
            low, high = min(low, uses.lo[use]), max(high, uses.hi[use])
    if node + 1 < len(moved.flat.touched_first):
        for k in range(moved.flat.touched_first[node], moved.flat.touched_first[node + 1]):
            use = moved.flat.touched[k]
            before = paid(moved.flat, use, choices)
            choices[node] = state
            change = paid(moved.flat, use, choices) - before
            choices[node] = now
            if change != 0.0:
                steps[moved.lo[use]] += change
                steps[moved.hi[use]] -= change
                low, high = min(low, moved.lo[use]), max(high, moved.hi[use])
    return min(low, high), high


@compiled
def overfilled(low: int, high: int, steps: FloatArray, room: FloatArray) -> int:
    """The row of [low, high) that a change, given by its steps, overfills most; -1 where it overfills none."""
    found, least, change = -1, 0.0, 0.0
    for row in range(low, high):
        change += steps[row]
        if room[row] - change < least:
            found, least = row, room[row] - change
    return found


@compiled
def move(node: int, state: int, choices: IntArray, uses: FlatUses, moved: MovedUses, room: FloatArray) -> None:
    """Makes a change: its choice, and what room (rows,) it leaves."""
    steps = np.zeros(len(room) + 1)
    low, high = shift(node, state, choices, uses, moved, steps)
    change = 0.0
    for row in range(low, high):
        change += steps[row]
        room[row] -= change
    choices[node] = state


@compiled
def in_row(row: int, offset: IntArray, uses: FlatUses) -> FloatArray:
    """(states,) what the nodes' own uses add up to in a row."""
    total = np.zeros(offset[-1])
    for node in range(len(offset) - 1):
        for use in range(uses.first[node], uses.first[node + 1]):
            if uses.lo[use] <= row < uses.hi[use]:
                for position in range(offset[node], offset[node + 1]):
                    total[position] += uses.amount[uses.start[use] + position - offset[node]]
    return total


@compiled
def cheapest_relief(need: float, local: FloatArray, offset: IntArray, choices: IntArray, used: FloatArray) -> int:
    """Where in the states the change is that costs least per byte freed, of `need` bytes at most; -1 where none is allowed.

    used: (states,) what each state uses of a row, all other nodes as chosen.
    """
    best, found = np.inf, -1
    for node in range(len(choices)):
        now = offset[node] + choices[node]
        for position in range(offset[node], offset[node + 1]):
            saved = used[now] - used[position]
            if saved > 0:
                rate = (local[position] - local[now]) / min(saved, need)
                if rate < best:
                    best, found = rate, position
    return found
