"""Transfers written as nodes and edges, as in IOPDDL: an equivalent problem, for comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxshard.solver import PlacementProblem
from fxshard.solver.problem.arrays import FloatArray


def expand(problem: PlacementProblem) -> PlacementProblem:
    """The same problem without transfers. Raises ValueError where rows or lives refer to transfers.

    The original nodes come first, so a solution begins with their choices. The optimum is the same.

    A transfer with one reader becomes an edge. With several readers, each layout wanted becomes a node with the states "absent" and
    "present". Its edge to the source charges for "present"; its edges to the readers that can want the layout forbid "absent" when they do.
    """
    if any(live.transfer >= 0 for live in problem.lives) or any(row.transfers for row in problem.rows):
        raise ValueError("transfers that count in rows or use memory cannot be written as edges")
    costs, names = list(problem.node_costs), [problem.name(node) for node in range(len(problem))]
    edges, tables = list(problem.edges), list(problem.edge_costs)

    def edge(i: int, j: int, table: FloatArray) -> None:
        edges.append((i, j))
        tables.append(table)

    for transfer in problem.transfers:
        source, have = transfer.source, transfer.have
        if len(transfer.readers) == 1:
            [(reader, want)] = transfer.readers
            edge(source, reader, transfer.prices[np.ix_(have, want)])
            continue
        for layout in np.unique(np.concatenate([want for _, want in transfer.readers])):
            there = len(costs)
            costs.append(np.zeros(2))
            names.append(f"{problem.name(source)} in layout {layout}")
            edge(source, there, np.stack([np.zeros(len(have)), transfer.prices[have, layout]], axis=1))
            for reader, want in transfer.readers:
                if (want == layout).any():
                    edge(there, reader, np.stack([np.where(want == layout, np.inf, 0.0), np.zeros(len(want))]))
    more = (None,) * (len(costs) - len(problem))
    return replace(
        problem,
        node_costs=tuple(costs),
        edges=tuple(edges),
        edge_costs=tuple(tables),
        usages=(*problem.usages, *more),
        intervals=(*problem.intervals, *more),
        node_names=tuple(names),
        transfers=(),
    )
