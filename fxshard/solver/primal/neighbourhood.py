"""Large neighbourhood search: free some nodes of the best plan and keep the others fixed.

Shaw, "Using constraint programming and local search methods to solve vehicle routing problems" (1998). The free nodes lie around a random
node and around another one that uses memory at the same, fullest, time, so that one can release memory for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.model import Model, Pair
from fxshard.solver.problem.row_uses import Use


def neighbourhoods(model: Model, choices: IntArray, rng: np.random.Generator, entries: int) -> Iterator[int]:
    """Nodes to free, nearest first, until their tables have this many entries."""
    adjacent = model.neighbours()
    first = int(rng.integers(len(model)))
    queues = [deque([first])]
    if model.uses[first]:
        row = _fullest(model, choices, model.uses[first])
        sharing = [node for node, uses in enumerate(model.uses) if any(use.lo <= row < use.hi for use in uses)]
        queues.append(deque([sharing[int(rng.integers(len(sharing)))]]))
    seen: set[int] = set()
    size, turn = 0, 0
    while any(queues) and size < entries:
        queue = queues[turn % len(queues)]
        turn += 1
        if not queue:
            continue
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        size += len(model.costs[node]) + sum(model.table(node, other).size for other in adjacent[node] if other in seen)
        queue.extend(other for other in adjacent[node] if other not in seen)
        yield node


def freed(model: Model, choices: IntArray, nodes: IntArray) -> Model:
    """The model of some nodes, all others fixed; its constant is the cost of the others among themselves."""
    new = {int(node): index for index, node in enumerate(nodes)}
    costs: list[FloatArray] = [model.costs[node] for node in nodes]
    edges: dict[Pair, FloatArray] = {}
    uses: list[tuple[Use, ...]] = [model.uses[node] for node in nodes]
    for (i, j), table in model.edges.items():
        if i in new and j in new:
            edges[new[i], new[j]] = table
        elif i in new:
            costs[new[i]] = costs[new[i]] + table[:, choices[j]]
        elif j in new:
            costs[new[j]] = costs[new[j]] + table[choices[i]]
    inside = Model(costs, edges, uses, model.limits, prices=model.prices, grain=model.grain, slopes=model.slopes)
    chosen = choices[nodes]
    limits = model.limits - model.usage(choices) + inside.usage(chosen)
    return replace(inside, limits=limits, constant=model.linear(choices) - inside.linear(chosen))


def _fullest(model: Model, choices: IntArray, uses: tuple[Use, ...]) -> int:
    """The row with the least room among those of these uses."""
    room = model.limits - model.usage(choices)
    rows = np.concatenate([np.arange(use.lo, use.hi) for use in uses])
    return int(rows[room[rows].argmin()])
