"""Why a problem has no solution: a small set of nodes that conflict, or the memory that would be needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .arrays import FloatArray
from .budget import Budget
from .elimination import eliminate, elimination_order
from .highs import solve_mip
from .infeasible import Exhausted, InfeasibleError
from .model import Model, add_edge, from_problem, restrict
from .problem import PlacementProblem
from .reductions import reduce
from .reductions.arc_consistency import supported
from .solution import Solution
from .transfers import Transfers

MAX_TESTS = 400
MEMORY_STEPS = 8
PROOF = 1e-9
"""Relative rounding of a bound on a sum that is not taken for a proof."""

Minimise = Callable[[PlacementProblem], Solution]


def explain(problem: PlacementProblem, minimise: Minimise) -> InfeasibleError:
    """The error for a problem known to have no solution; `minimise` solves problems without a memory limit."""
    model = _hard(problem)
    if not possible(model):
        nodes = _conflict(model)
        names = ", ".join(problem.name(node) for node in nodes)
        return InfeasibleError(f"nothing is allowed for {names} together: the forbidden entries leave no choice", nodes)
    limits = _limits(problem)
    misses = []
    for name, one in limits:
        alone = from_problem(one)
        least, bound, choices = _least_usage(alone, model, minimise)
        if least > alone.limits.max(initial=-np.inf):
            shift = one.rows[0].ceiling - float(alone.limits[0]) if one.rows else 0.0
            misses.append((name, one.rows, least + shift, bound + shift, choices))
    if not misses:
        return InfeasibleError(f"no allowed choice fits in {' and '.join(name for name, _ in limits)} together, though one fits in each")
    name, rows, least, bound, choices = misses[0]
    what = "sum" if rows else "peak"
    message = f"no allowed choice fits in {name}: the least {what} found is {least:.17g}, and none is below {bound:.17g}"
    return InfeasibleError(message, (), least, bound, rows[0].name if rows else None, choices)


def near_limits(problem: PlacementProblem, minimise: Minimise) -> tuple[list[tuple[int, ...]], bool]:
    """Choices that come near each limit with the least found of its sum, and whether that proves that some limit cannot be kept."""
    hard, every = _hard(problem), []
    for _, one in _limits(problem):
        alone = from_problem(one)
        _, bound, choices = _least_usage(alone, hard, minimise)
        if bound * (1 - PROOF) > alone.limits.max(initial=-np.inf):
            return [], True
        every.append(choices)
    return every, False


def _limits(problem: PlacementProblem) -> list[tuple[str, PlacementProblem]]:
    """Each limit that may not be exceeded, in words, and the problem with that one alone."""
    limits: list[tuple[str, PlacementProblem]] = []
    if problem.usage_limit is not None and problem.all_lives:
        limits.append((f"{problem.usage_limit:.17g} bytes", replace(problem, rows=())))
    for row in problem.rows:
        if row.hard:
            limits.append((f"{row.name or 'a row'} of {row.limit:.17g}", replace(problem, usage_limit=None, rows=(row,))))
    return limits


def possible(model: Model) -> bool:
    """Whether a model without memory has any allowed choice at all."""
    try:
        smaller, _, _ = reduce(model)
    except Exhausted:
        return False
    if not len(smaller):
        return True
    order = elimination_order(smaller)
    if order is not None:
        return eliminate(smaller, order, Budget()) is not None
    return solve_mip(smaller, Budget()).choices is not None


def _hard(problem: PlacementProblem) -> Model:
    """What is allowed and what is not, as costs 0 and inf; no memory."""
    model = from_problem(replace(problem, usage_limit=None, rows=()))
    costs = [np.where(np.isinf(cost), np.inf, 0.0) for cost in model.costs]
    edges = {pair: np.where(np.isinf(table), np.inf, 0.0) for pair, table in model.edges.items()}
    for transfer in model.transfers:
        if np.isinf(transfer.prices).any():
            forbidden = np.where(np.isinf(transfer.prices), np.inf, 0.0)
            for reader, want in transfer.readers:
                add_edge(edges, transfer.source, reader, forbidden[np.ix_(transfer.have, want)])
    return replace(model, costs=costs, edges=edges, transfers=Transfers())


def _conflict(model: Model) -> tuple[int, ...]:
    """A small set of nodes that has no choice by itself; minimal unless that takes too many tests."""
    nodes = _neighbourhood(model)
    tests, chunk = 0, max(1, len(nodes) // 2)
    while tests < MAX_TESTS:
        start, removed = 0, False
        while start < len(nodes) and tests < MAX_TESTS:
            rest = nodes[:start] + nodes[start + chunk :]
            tests += 1
            if rest and not possible(_part(model, rest)):
                nodes, removed = rest, True
            else:
                start += chunk
        if chunk == 1 and not removed:
            break
        chunk = max(1, chunk // 2)
    return tuple(nodes)


def _neighbourhood(model: Model) -> list[int]:
    """Nodes that hold a conflict: rings around where arc consistency fails, or all nodes where it does not."""
    empty = [node for node, mask in enumerate(supported(model)) if not mask.any()]
    if not empty:
        return list(range(len(model)))
    neighbours = model.neighbours()
    nodes, ring = {empty[0]}, {empty[0]}
    while ring:
        part = sorted(nodes)
        if any(not mask.any() for mask in supported(_part(model, part))):
            return part
        ring = {other for node in ring for other in neighbours[node]} - nodes
        nodes |= ring
    return sorted(nodes)


def _part(model: Model, nodes: list[int]) -> Model:
    return restrict(model, np.asarray(nodes, dtype=np.int64), 1.0)


def _least_usage(memory: Model, hard: Model, minimise: Minimise) -> tuple[float, float, tuple[int, ...]]:
    """The least peak found, a bound on it, and its choices: least weighted usages, for growing weights on the rows that peak."""
    weight = np.zeros(len(memory.limits))
    weight[int(_floor(memory).argmax())] = 1.0
    least, bound = np.inf, float(_floor(memory).max())
    choices: tuple[int, ...] = ()
    for step in range(1, MEMORY_STEPS + 1):
        solution = minimise(_weighted(memory, hard, weight))
        usage = memory.usage(np.asarray(solution.choices))
        if (found := float(usage.max(initial=0.0))) < least:
            least, choices = found, solution.choices
        bound = max(bound, solution.lower_bound)
        if least <= bound * (1 + 1e-12):
            break
        weight *= step / (step + 1)
        weight[int(usage.argmax())] += 1 / (step + 1)
    return least, min(bound, least), choices


def _floor(memory: Model) -> FloatArray:
    """The sum of each row were every use at its least."""
    steps = np.zeros(len(memory.limits) + 1)
    for terms in memory.uses:
        for use in terms:
            steps[use.lo] += use.amount.min()
            steps[use.hi] -= use.amount.min()
    return np.cumsum(steps)[:-1]


def _weighted(memory: Model, hard: Model, weight: FloatArray) -> PlacementProblem:
    """The problem whose cost is the weighted usage of the rows."""
    cumulated = np.concatenate([[0.0], np.cumsum(weight)])
    costs = [
        cost + sum((use.amount * (cumulated[use.hi] - cumulated[use.lo]) for use in terms), np.zeros(len(cost)))
        for cost, terms in zip(hard.costs, memory.uses, strict=True)
    ]
    moved = memory.moving.weighted(cumulated, len(memory.transfers))
    transfers = [replace(t, prices=np.where(np.isinf(t.prices), 0.0, amounts)) for t, amounts in zip(memory.transfers, moved, strict=True)]
    return PlacementProblem(tuple(costs), tuple(hard.edges), tuple(hard.edges.values()), transfers=tuple(transfers))
