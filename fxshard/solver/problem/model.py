"""The solver's internal form: a simple graph, integer costs held in float64, memory as rows.

Every step returns a new `Model`; the arrays inside are shared and never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray, starts
from fxshard.solver.problem.problem import PlacementProblem, usage_ceiling
from fxshard.solver.problem.row_uses import Moving, Use
from fxshard.solver.problem.transfers import Transfers
from fxshard.solver.problem.uses import UseTable

Pair = tuple[int, int]
Undo = Callable[[IntArray], IntArray]


@dataclass(frozen=True)
class Model:
    """costs (k_i,) per node; edges keyed by (i, j), i < j, each (k_i, k_j); uses per node; limits (rows,).

    slopes: (rows,) cost of each unit beyond a limit, `inf` (the default) where it is hard. moved: uses per transfer.
    constant: cost common to all plans. cutoff: total cost of the best plan known; only plans strictly cheaper matter.
    prices: (rows,) the multipliers of rows that gave the best bound so far, cost per unit of the row.
    transfers: values redistributed to the layouts that their readers want; only `relax` and its helpers support them (and `moved`).
    grain: the least improvement worth searching for.
    """

    costs: list[FloatArray]
    edges: dict[Pair, FloatArray]
    uses: list[tuple[Use, ...]]
    limits: FloatArray
    constant: float = 0.0
    cutoff: float = np.inf
    prices: FloatArray = field(default_factory=lambda: np.zeros(0))
    grain: float = 1.0
    transfers: Transfers = field(default_factory=Transfers)
    slopes: FloatArray = field(default_factory=lambda: np.zeros(0))
    moved: tuple[tuple[Use, ...], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.slopes):
            object.__setattr__(self, "slopes", np.full(len(self.limits), np.inf))

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def use_table(self) -> UseTable:
        """The uses as flat arrays, computed once."""
        return UseTable(np.asarray([len(cost) for cost in self.costs], dtype=np.int64), self.uses)

    @property
    def entries(self) -> int:
        """The number of entries of all tables, the measure of work."""
        tables = sum(c.size for c in self.costs) + sum(e.size for e in self.edges.values())
        return tables + sum(t.entries for t in self.transfers)

    def evaluate(self, choices: IntArray) -> float:
        """E(x) with the penalties of rows; exact while all costs are integers and no row has a slope."""
        soft = np.isfinite(self.slopes)
        if not soft.any():
            return self.linear(choices)
        over = np.maximum(self.usage(choices) - self.limits, 0.0)
        return self.linear(choices) + float(self.slopes[soft] @ over[soft])

    @cached_property
    def flat_costs(self) -> tuple[FloatArray, IntArray]:
        """The costs of all states (states,), and where each node's begin (nodes,)."""
        return np.concatenate([*self.costs, np.zeros(0)]), starts([len(cost) for cost in self.costs])[:-1]

    def linear(self, choices: IntArray) -> float:
        """E(x) without rows."""
        costs, offset = self.flat_costs
        total = self.constant + sum(costs[offset + choices].tolist())  # summed in sequence, to round as `PlacementProblem.evaluate` does
        total += self.transfers.cost(choices)
        return total + sum(float(e[choices[i], choices[j]]) for (i, j), e in self.edges.items())

    @cached_property
    def moving(self) -> Moving:
        """The uses of transfers."""
        return Moving(self.transfers, self.moved)

    def usage(self, choices: IntArray) -> FloatArray:
        """The sum of each row, (rows,)."""
        rows = len(self.limits)
        return np.cumsum(self.use_table.steps(choices, rows) + self.moving.steps(choices, rows))[:-1]

    def fits(self, choices: IntArray) -> bool:
        """Whether every hard row is within its limit."""
        return not len(self.limits) or bool(np.all((self.usage(choices) <= self.limits) | np.isfinite(self.slopes)))

    def neighbours(self) -> list[list[int]]:
        """Neighbour indexes per node, ascending."""
        lists: list[list[int]] = [[] for _ in self.costs]
        for i, j in self.edges:
            lists[i].append(j)
            lists[j].append(i)
        return [sorted(neighbours) for neighbours in lists]

    def table(self, i: int, j: int) -> FloatArray:
        """The table of the edge between two nodes, with the states of `i` as rows."""
        return self.edges[i, j] if i < j else self.edges[j, i].T

    def describe(self) -> str:
        """The model's size in words, for the history of a solve."""
        links = f"{len(self.edges)} edges" + (f", {len(self.transfers)} transfers" if self.transfers else "")
        return f"{len(self)} nodes, {links}, {self.entries} entries, {len(self.limits)} memory rows"


def from_problem(problem: PlacementProblem) -> Model:
    """The model of a problem: parallel edges summed, edges (i, i) added to their node, one row per time between two interval ends."""
    costs = list(problem.node_costs)
    edges: dict[Pair, FloatArray] = {}
    for (i, j), table in zip(problem.edges, problem.edge_costs, strict=True):
        if i == j:
            costs[i] = costs[i] + np.diagonal(table)
        else:
            add_edge(edges, i, j, table)
    transfers = Transfers(problem.transfers)
    return _with_rows(Model(costs, edges, [()] * len(problem), np.zeros(0), transfers=transfers), problem)


def _with_rows(model: Model, problem: PlacementProblem) -> Model:
    """Adds one row per time between the ends of lives, then the problem's rows, with each node's least weight moved to the limit."""
    lives = problem.all_lives if problem.usage_limit is not None else ()
    times = sorted({t for live in lives for t in (live.lo, live.hi)})
    number = {t: index for index, t in enumerate(times)}
    uses: list[list[Use]] = [[] for _ in problem.node_costs]
    moved: list[list[Use]] = [[] for _ in problem.transfers]
    for live in lives:
        use = Use(number[live.lo], number[live.hi], live.amount)
        (uses[live.node] if live.node >= 0 else moved[live.transfer]).append(use)
    count = max(0, len(times) - 1)
    limits = [usage_ceiling(problem.usage_limit or 0.0)] * count
    for index, row in enumerate(problem.rows, count):
        limit = row.ceiling
        for node, weights in row.nodes:
            least = float(weights.min(initial=np.inf)) if len(weights) else 0.0
            uses[node].append(Use(index, index + 1, weights - least))
            limit -= least
        for transfer, weights in row.transfers:
            moved[transfer].append(Use(index, index + 1, weights))
        limits.append(limit)
    slopes = [np.inf] * count + [row.slope for row in problem.rows]
    return replace(
        model,
        uses=[tuple(terms) for terms in uses],
        moved=tuple(tuple(terms) for terms in moved) if any(moved) else (),
        limits=np.asarray(limits, dtype=np.float64),
        slopes=np.asarray(slopes, dtype=np.float64),
        prices=np.zeros(len(limits)),
    )


def add_edge(edges: dict[Pair, FloatArray], i: int, j: int, table: FloatArray) -> None:
    """Add a (k_i, k_j) table to the edge between `i` and `j`; changes the dictionary, not the tables in it."""
    key, oriented = ((i, j), table) if i < j else ((j, i), table.T)
    edges[key] = edges[key] + oriented if key in edges else oriented


def keep_states(model: Model, keep: Sequence[IntArray | None]) -> tuple[Model, Undo]:
    """The model with only some states per node (None keeps all), and the map of its choices back to the old indexes."""
    costs, uses, edges = list(model.costs), list(model.uses), dict(model.edges)
    for node, kept in enumerate(keep):
        if kept is not None:
            costs[node] = costs[node][kept]
            uses[node] = tuple(Use(u.lo, u.hi, u.amount[kept]) for u in uses[node])
    for (i, j), table in model.edges.items():
        rows, columns = keep[i], keep[j]
        if rows is not None:
            table = table[rows]
        if columns is not None:
            table = table[:, columns]
        if rows is not None or columns is not None:
            edges[i, j] = np.ascontiguousarray(table)
    changed = [(node, kept) for node, kept in enumerate(keep) if kept is not None]

    def undo(choices: IntArray) -> IntArray:
        old = choices.copy()
        for node, kept in changed:
            old[node] = kept[choices[node]]
        return old

    transfers = Transfers(transfer.keep(keep) for transfer in model.transfers)
    return replace(model, costs=costs, edges=edges, uses=uses, transfers=transfers), undo


def drop_nodes(model: Model, gone: set[int]) -> tuple[Model, IntArray]:
    """The model without the nodes `gone`, which have no edges, and the old index of each remaining node."""
    left = [node for node in range(len(model)) if node not in gone]
    new = {node: index for index, node in enumerate(left)}
    edges = {(new[i], new[j]): table for (i, j), table in model.edges.items()}
    costs = [model.costs[node] for node in left]
    smaller = replace(model, costs=costs, edges=edges, uses=[model.uses[node] for node in left])
    return smaller, np.asarray(left, dtype=np.int64)


def components(model: Model) -> list[IntArray]:
    """Node indexes of each connected component (edges and rows connect nodes), in order of their first node."""
    root = list(range(len(model)))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    memory = [node for node, uses in enumerate(model.uses) if uses]
    links = [*model.edges, *pairwise(memory)]
    for i, j in links:
        a, b = find(i), find(j)
        root[max(a, b)] = min(a, b)
    parts: dict[int, list[int]] = {}
    for node in range(len(model)):
        parts.setdefault(find(node), []).append(node)
    return [np.asarray(part, dtype=np.int64) for part in parts.values()]


def restrict(model: Model, nodes: IntArray, grain: float) -> Model:
    """The model of one component, at constant 0 and without a cutoff."""
    new = {int(node): index for index, node in enumerate(nodes)}
    edges = {(new[i], new[j]): table for (i, j), table in model.edges.items() if i in new and j in new}
    costs, uses = [model.costs[n] for n in nodes], [model.uses[n] for n in nodes]
    rows = len(model.limits) if any(uses) else 0
    return Model(costs, edges, uses, model.limits[:rows], prices=model.prices[:rows], grain=grain, slopes=model.slopes[:rows])
