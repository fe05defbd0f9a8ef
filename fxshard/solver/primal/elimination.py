"""Exact variable elimination (dynamic programming over a tree decomposition), in a greedy order that keeps tables small.

Bertele and Brioschi, "Nonserial dynamic programming" (1972). Exponential only in the treewidth of the graph, which is 5 to 10 for
aten graphs.
"""

from __future__ import annotations

import heapq
from math import prod

import numpy as np
import numpy.typing as npt

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

MAX_TABLE = 20_000_000
"""The most entries of one joined table, the states of the eliminated node included."""

MAX_WORK = 1_500_000_000
"""The most entries of all joined tables together."""

Factor = tuple[tuple[int, ...], FloatArray]


def elimination_order(model: Model, max_table: float = MAX_TABLE, max_work: float = MAX_WORK) -> list[int] | None:
    """The order that always eliminates the node with the smallest table, ties by index; None where a table or their sum is too large."""
    sizes = [len(cost) for cost in model.costs]
    adjacent = [set(neighbours) for neighbours in model.neighbours()]
    heap = [(_table_size(sizes, adjacent, node), node) for node in range(len(sizes))]
    heapq.heapify(heap)
    current = {node: size for size, node in heap}
    order: list[int] = []
    work = 0
    while heap:
        size, node = heapq.heappop(heap)
        if current.get(node) != size:
            continue
        del current[node]
        work += size
        if size > max_table or work > max_work:
            return None
        order.append(node)
        others = adjacent[node]
        for other in others:
            adjacent[other] |= others
            adjacent[other] -= {node, other}
        for other in sorted(others):
            current[other] = _table_size(sizes, adjacent, other)
            heapq.heappush(heap, (current[other], other))
    return order


def eliminate(model: Model, order: list[int], budget: Budget) -> IntArray | None:
    """The cheapest choices, rows ignored; None where no choice is allowed or the budget ended."""
    factors: list[list[Factor]] = [[] for _ in model.costs]
    position = {node: index for index, node in enumerate(order)}
    for node, cost in enumerate(model.costs):
        factors[node].append(((node,), cost))
    for i, j in model.edges:
        first = (i, j) if position[i] < position[j] else (j, i)
        factors[first[0]].append((first, model.table(*first)))
    decisions: list[tuple[int, tuple[int, ...], npt.NDArray[np.uint16]]] = []
    for node in order:
        if budget.spent:
            return None
        variables, best, state = _minimise(node, factors[node], position, model)
        factors[node] = []
        budget.charge(best.size * len(model.costs[node]))
        decisions.append((node, variables, state))
        if variables:
            factors[variables[0]].append((variables, best))
        elif np.isinf(best):
            return None
    choices = np.zeros(len(model), dtype=np.int64)
    for node, variables, state in reversed(decisions):
        choices[node] = state[tuple(choices[list(variables)])]
    return choices


def _table_size(sizes: list[int], adjacent: list[set[int]], node: int) -> int:
    return sizes[node] * prod(sizes[other] for other in adjacent[node])


def _minimise(
    node: int, factors: list[Factor], position: dict[int, int], model: Model
) -> tuple[tuple[int, ...], FloatArray, npt.NDArray[np.uint16]]:
    """Minimise the sum of a node's factors over its states: (other variables in order, minimum per assignment, its first minimiser)."""
    names = {name for variables, _ in factors for name in variables} - {node}
    variables = tuple(sorted(names, key=position.__getitem__))
    aligned = [_align(factor, node, variables) for factor in factors]
    shape = tuple(len(model.costs[name]) for name in variables)
    best = np.full(shape, np.inf)
    state = np.zeros(shape, dtype=np.uint16)
    for index in range(len(model.costs[node])):
        table: FloatArray = np.zeros(shape)
        for values in aligned:
            table += values[index]
        better = table < best
        np.copyto(best, table, where=better)
        np.copyto(state, np.uint16(index), where=better)
    return variables, best, state


def _align(factor: Factor, node: int, variables: tuple[int, ...]) -> FloatArray:
    """The factor's table with `node` first, then one dim per variable (of length 1 if the factor lacks it)."""
    names, table = factor
    axes = [names.index(node)] + [names.index(name) for name in variables if name in names]
    sizes = [table.shape[names.index(name)] if name in names else 1 for name in variables]
    return np.ascontiguousarray(table.transpose(axes)).reshape([table.shape[axes[0]], *sizes])
