"""Small random problems, and brute force to check the solver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fxshard.solver import Live, PlacementProblem, Row, Transfer
from fxshard.solver.bounds.sweeps import Sweeper
from fxshard.solver.problem.model import Model, from_problem
from fxshard.solver.problem.scaling import quantise


def brute_force(problem: PlacementProblem) -> float:
    """The least cost of all choices that are allowed and fit, inf if there are none. Computed here with one array over all choices."""
    sizes = [len(cost) for cost in problem.node_costs]
    state = np.ogrid[tuple(slice(size) for size in sizes)]
    total = np.zeros(sizes)
    for node, cost in enumerate(problem.node_costs):
        total += cost[state[node]]
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        total += table[state[i], state[j]]
    for transfer in problem.transfers:
        have = transfer.have[state[transfer.source]]
        for layout in range(transfer.prices.shape[1]):
            wanted = np.logical_or.reduce(np.broadcast_arrays(*(want[state[node]] == layout for node, want in transfer.readers)))
            total += np.where(wanted, transfer.prices[have, layout], 0.0)

    def moved(index: int, table: np.ndarray) -> np.ndarray:
        transfer = problem.transfers[index]
        have, whole = transfer.have[state[transfer.source]], np.zeros(sizes)
        for layout in range(table.shape[1]):
            wanted = np.logical_or.reduce(np.broadcast_arrays(*(want[state[node]] == layout for node, want in transfer.readers)))
            whole += np.where(wanted, table[have, layout], 0.0)
        return whole

    for row in problem.rows:
        used = sum((w[state[n]] for n, w in row.nodes), np.zeros(())) + sum((moved(t, w) for t, w in row.transfers), np.zeros(()))
        over = np.maximum(used - row.limit, 0.0)
        total += np.where(over > 0, np.inf, 0.0) if np.isinf(row.slope) else row.slope * over
    if problem.usage_limit is not None:
        uses = zip(state, problem.usages, problem.intervals, strict=True)
        live = [(usage[x], span) for x, usage, span in uses if usage is not None and span is not None]
        live += [(x.amount[state[x.node]] if x.node >= 0 else moved(x.transfer, x.amount), (x.lo, x.hi)) for x in problem.lives]
        for time in {lo for _, (lo, _) in live}:
            used = sum((amount for amount, (lo, hi) in live if lo <= time < hi), np.zeros(()))
            total += np.where(used > problem.usage_limit, np.inf, 0.0)
    return float(total.min(initial=np.inf))


def swept(model: Model, sweeps: int) -> Iterator[Sweeper]:
    """Sweeps forward and backward. Checks after each that the bound is valid and the decoded plan costs no less than the optimum."""
    best, sweeper = optimum(model), Sweeper(model)
    for sweep in range(sweeps):
        assert sweeper.sweep(sweep % 2) <= best
        yield sweeper
        plan = sweeper.decode(1 - sweep % 2)
        assert plan is None or model.evaluate(plan) >= best


@st.composite
def problems(draw: st.DrawFn, memory: bool = False, integers: bool = True, most: int = 6) -> PlacementProblem:
    """Up to ``most`` nodes of 1 to 4 states, any edges, parallel ones and loops too, with forbidden entries."""
    count = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = rng.integers(1, 5, count)
    forbidden = draw(st.sampled_from([0.0, 0.2, 0.5]))
    high = draw(st.sampled_from([3, 20, 10**6]))

    def costs(*shape: int) -> np.ndarray:
        values = rng.integers(0, high, shape).astype(float) if integers else rng.random(shape) * high
        return np.where(rng.random(shape) < forbidden / len(shape) ** 2, np.inf, values)

    pairs = [tuple(int(v) for v in rng.integers(0, count, 2)) for _ in range(draw(st.integers(0, 2 * count)))]
    nodes, edges = tuple(costs(k) for k in sizes), tuple(costs(sizes[i], sizes[j]) for i, j in pairs)
    if not memory:
        return PlacementProblem(nodes, tuple(pairs), edges)
    usages = tuple(rng.integers(0, 10, k).astype(float) if rng.random() < 0.8 else None for k in sizes)
    starts = rng.integers(0, 6, count)
    spans = tuple((int(s), int(s + rng.integers(0, 6))) if rng.random() < 0.9 else None for s in starts)
    return PlacementProblem(nodes, tuple(pairs), edges, usages, spans, float(draw(st.integers(0, 30))))


def with_copies(rng: np.random.Generator, ops: int, layouts: int, extra: float = 0.4) -> PlacementProblem:
    """Nodes for operators that produce and read values in layouts, and a binary node for each value and layout it is copied to.

    A copy costs the change from the producer's layout, once for all readers. A reader may only read a layout that is present.
    """
    change = rng.integers(1, 50, (layouts, layouts)).astype(float)
    np.fill_diagonal(change, 0.0)
    reads = [(p, r) for r in range(1, ops) for p in range(r) if p == r - 1 or rng.random() < extra / r]
    width = max(1, layouts)
    sizes = rng.integers(2, width + 2, ops)
    gives = [rng.integers(0, layouts, k) for k in sizes]
    nodes = [rng.integers(0, 60, k).astype(float) for k in sizes]
    pairs: list[tuple[int, int]] = []
    tables: list[np.ndarray] = []
    for producer in sorted({p for p, _ in reads}):
        readers = [r for p, r in reads if p == producer]
        needs = [rng.integers(0, layouts, sizes[r]) for r in readers]
        for layout in range(layouts):
            copy = len(nodes)
            nodes.append(np.zeros(2))
            pairs.append((producer, copy))
            tables.append(np.stack([np.zeros(sizes[producer]), change[gives[producer], layout]], axis=1))
            for reader, need in zip(readers, needs, strict=True):
                pairs.append((copy, reader))
                tables.append(np.stack([np.where(need == layout, np.inf, 0.0), np.zeros(sizes[reader])]))
    return PlacementProblem(tuple(nodes), tuple(pairs), tuple(tables))


@st.composite
def with_transfers(draw: st.DrawFn, memory: bool = False, integers: bool = True, most: int = 5) -> PlacementProblem:
    """A random problem with up to three transfers, each with one to four readers, not always distinct, and up to three layouts."""
    problem = draw(problems(memory=memory, integers=integers, most=most).filter(lambda p: len(p) > 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    high, forbidden = draw(st.sampled_from([3, 20, 10**6])), draw(st.sampled_from([0.0, 0.2]))
    sizes = [len(cost) for cost in problem.node_costs]
    transfers = []
    for _ in range(draw(st.integers(1, 3))):
        layouts, source = int(rng.integers(1, 4)), int(rng.integers(len(problem)))
        prices = rng.integers(0, high, (layouts, layouts)).astype(float) if integers else rng.random((layouts, layouts)) * high
        prices[rng.random(prices.shape) < forbidden] = np.inf
        np.fill_diagonal(prices, 0.0)
        nodes = [int(n) for n in rng.integers(len(problem), size=rng.integers(1, 5)) if n != source]
        readers = tuple((n, rng.integers(0, layouts, sizes[n])) for n in nodes)
        if readers:
            transfers.append(Transfer(source, rng.integers(0, layouts, sizes[source]), readers, prices))
    return replace(problem, transfers=tuple(transfers))


@st.composite
def with_rows(draw: st.DrawFn, hard: bool = False, memory: bool = False, integers: bool = True, most: int = 4) -> PlacementProblem:
    """A random problem with transfers, one to three rows over nodes and transfers, and (with memory) lives of both."""
    problem = draw(with_transfers(memory=memory, integers=integers, most=most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [len(cost) for cost in problem.node_costs]

    def row() -> Row:
        nodes = tuple((n, rng.integers(-5, 9, k).astype(float)) for n, k in enumerate(sizes) if rng.random() < 0.6)
        moved = tuple((t, rng.integers(0, 9, x.prices.shape).astype(float)) for t, x in enumerate(problem.transfers) if rng.random() < 0.8)
        slope = np.inf if hard else float(rng.choice([0.0, 0.5, 1.0, 7.0]))
        return Row(float(rng.integers(-5, 25)), nodes, moved, slope)

    def live() -> Live:
        lo = int(rng.integers(0, 6))
        if problem.transfers and rng.random() < 0.5:
            t = int(rng.integers(len(problem.transfers)))
            return Live(lo, lo + 3, rng.integers(0, 9, problem.transfers[t].prices.shape).astype(float), transfer=t)
        node = int(rng.integers(len(sizes)))
        return Live(lo, lo + 3, rng.integers(0, 9, sizes[node]).astype(float), node)

    lives = tuple(live() for _ in range(rng.integers(1, 4))) if memory else ()
    return replace(problem, rows=tuple(row() for _ in range(rng.integers(0 if memory else 1, 4))), lives=lives)


def without_transfers(problem: PlacementProblem) -> PlacementProblem:
    """The problem without transfers, also in rows and lives."""
    rows = tuple(replace(row, transfers=()) for row in problem.rows)
    return replace(problem, transfers=(), rows=rows, lives=tuple(live for live in problem.lives if live.transfer < 0))


def grid(
    rows: int, columns: int, states: int, seed: int, *, memory: bool = False, transfers: bool = False, integers: bool = False
) -> PlacementProblem:
    """A grid with random edges. No bound is tight, so every part of the search runs.

        Node costs are 3 to 4, or a million times that with ``integers``. The memory limit is 60% of the greatest peak. A transfer has
    three readers.
    """
    rng = np.random.default_rng(seed)

    def random(*shape: int, least: float = 0.0) -> np.ndarray:
        costs = least + rng.random(shape)
        return np.rint(1e6 * costs) if integers else costs

    def transfer(layouts: int = 3) -> Transfer:
        source, *readers = rng.choice(rows * columns, 4, replace=False).tolist()
        have, *wants = (rng.integers(0, layouts, states) for _ in range(4))
        return Transfer(source, have, tuple(zip(readers, wants, strict=True)), random(layouts, layouts) * (1 - np.eye(layouts)))

    cells = np.arange(rows * columns).reshape(rows, columns)
    pairs = [*zip(cells[:, :-1].flat, cells[:, 1:].flat, strict=True), *zip(cells[:-1].flat, cells[1:].flat, strict=True)]
    problem = PlacementProblem(
        tuple(random(states, least=3.0) for _ in cells.flat), tuple(pairs), tuple(random(states, states) for _ in pairs)
    )
    if transfers:
        problem = replace(problem, transfers=tuple(transfer() for _ in range(cells.size // 2)))
    if memory:
        usages = tuple(rng.integers(0, 10, states).astype(float) for _ in cells.flat)
        spans = tuple((int(s), int(s + rng.integers(1, cells.size))) for s in rng.integers(0, cells.size, cells.size))
        problem = replace(problem, usages=usages, intervals=spans, usage_limit=0.0)
        problem = replace(problem, usage_limit=problem.peak([int(usage.argmax()) for usage in usages]) * 0.6)
    return problem


def integer_model(problem: PlacementProblem) -> Model:
    """The model of the solver for ``problem``, with integer costs, before any reduction."""
    return quantise(from_problem(problem))[0]


def plans(model: Model) -> list[np.ndarray]:
    """All choices of a model that are allowed and fit."""
    ranges = [range(len(cost)) for cost in model.costs]
    every = (np.asarray(plan, dtype=np.int64) for plan in itertools.product(*ranges))
    return [plan for plan in every if np.isfinite(model.evaluate(plan)) and model.fits(plan)]


def optimum(model: Model) -> float:
    """The least cost of any plan of a model, inf without one."""
    return min((model.evaluate(plan) for plan in plans(model)), default=float("inf"))
