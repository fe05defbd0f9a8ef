"""Compiled loops of local search over all single changes of a plan."""

from __future__ import annotations

import numpy as np

from fxshard.compiled import compiled
from fxshard.solver.problem.arrays import FloatArray, IntArray
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
    """The index, in the states (states,), of the change that saves most and fits in the room (rows,); -1 where none saves cost.

    witness, seen: (states,) per change a row that it did not fit in at its last test (or -1) and that row's room then. The change is
    skipped until the row has more room. Both are updated here; the caller resets the witnesses of nodes whose uses change.
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
    """Add a change's effect to steps (rows + 1,), as differences from row to row; returns the range of rows [low, high) that it affects."""
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
    """The row of [low, high) that a change, given by its steps, exceeds most; -1 where it exceeds none."""
    found, least, change = -1, 0.0, 0.0
    for row in range(low, high):
        change += steps[row]
        if room[row] - change < least:
            found, least = row, room[row] - change
    return found


@compiled
def move(node: int, state: int, choices: IntArray, uses: FlatUses, moved: MovedUses, room: FloatArray) -> None:
    """Apply a change to the choices and to room (rows,)."""
    steps = np.zeros(len(room) + 1)
    low, high = shift(node, state, choices, uses, moved, steps)
    change = 0.0
    for row in range(low, high):
        change += steps[row]
        room[row] -= change
    choices[node] = state


@compiled
def in_row(row: int, offset: IntArray, uses: FlatUses) -> FloatArray:
    """(states,) each state's use of a row, transfers excluded."""
    total = np.zeros(offset[-1])
    for node in range(len(offset) - 1):
        for use in range(uses.first[node], uses.first[node + 1]):
            if uses.lo[use] <= row < uses.hi[use]:
                for position in range(offset[node], offset[node + 1]):
                    total[position] += uses.amount[uses.start[use] + position - offset[node]]
    return total


@compiled
def cheapest_relief(need: float, local: FloatArray, offset: IntArray, choices: IntArray, used: FloatArray) -> int:
    """The index, in the states, of the change with the least cost per byte freed; -1 where no allowed change frees any.

    need: bytes to free; a change that frees more counts as freeing this many.
    used: (states,) each state's use of the row, all other nodes as chosen.
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
