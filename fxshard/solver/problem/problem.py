"""The placement problem, as numbers.

Choose one strategy x_i for every node i so as to minimise (`PlacementProblem.evaluate`)

    E(x) = sum_i c_i[x_i] + sum_(i,j) e_ij[x_i, x_j] + sum_v T_v(x)

where T_v is the cost of redistributing a value to the layouts that its readers want (`transfers.Transfer`) and `inf` marks
forbidden entries, subject to the memory limit at every time t (`PlacementProblem.peak`)

    sum_{i : lo_i <= t < hi_i} u_i[x_i] <= usage_limit.

Further constraints on the whole plan are *rows* (`rows.Row`): with w_r(x) a weighted sum over chosen states and paid transfers,

    E(x) += sum_r slope_r max(0, w_r(x) - limit_r),      slope_r = inf for a hard limit.

The solver works on an exact integer form (`model.from_problem`, `scaling.quantise`). A lower bound is its Lagrangian
(`multipliers.prices`), for any lambda over the times and rows between 0 and the slope of each:

    L(x, lambda) = E(x) + sum_t lambda_t (usage_t(x) - usage_limit) <= E(x)      for every x that fits.

Reparameterisation bounds the minimum of L (`sweeps.Sweeper`): messages m move cost between edges and nodes,

    S_i = c_i + lambda u_i + sum_j m_ji,    e'_ij = e_ij - m_ji (+) - m_ij,     E = sum S_i + sum e'_ij    for every m,

and with integer shares s_i ~ S_i / n_i given to the d_i edges that leave i in the direction of the sweep

    min L >= sum_i min(S_i - d_i s_i) + sum_ij min(s_i + e'_ij).

Without transfers and rows the problem is that of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism (google/iopddl),
whose files `read` and `write` handle.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray
from fxshard.solver.problem.rows import Live, Row
from fxshard.solver.problem.timeline import Timeline
from fxshard.solver.problem.transfers import Transfer

FORBIDDEN = 1e15
"""IOPDDL has no infinity; costs of this size and more stand for it."""

USAGE_TOLERANCE = 1e-12
"""Relative slack on `usage_limit` for the rounding of float sums; less than a byte for limits below a terabyte."""


@dataclass(frozen=True)
class PlacementProblem:
    """One cost vector a node, one cost matrix an edge, and optionally memory over time.

    node_costs: per node (k_i,), any finite cost or `inf`.
    edges: pairs of node indexes; parallel edges add up, (i, i) prices a node's own state.
    edge_costs: per edge (k_i, k_j), finite or `inf`.
    usages: per node (k_i,) bytes >= 0, or None for a node that uses no memory.
    intervals: per node the half-open time interval [lo, hi) in which it uses memory, or None for never.
    usage_limit: bytes available at every time, None for no limit.
    transfers: redistributions of values, each paid once per layout for all readers.
    lives: further memory over time, of nodes with several buffers and of transfers.
    rows: sums over the whole plan that are limited, or penalised beyond a limit.
    """

    node_costs: tuple[FloatArray, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[FloatArray, ...] = ()
    usages: tuple[FloatArray | None, ...] = ()
    intervals: tuple[tuple[int, int] | None, ...] = ()
    usage_limit: float | None = None
    node_names: tuple[str, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    lives: tuple[Live, ...] = ()
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.node_costs)
        _set(self, "node_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.node_costs))
        _set(self, "edges", tuple((int(i), int(j)) for i, j in self.edges))
        _set(self, "edge_costs", tuple(np.asarray(c, dtype=np.float64) for c in self.edge_costs))
        usages = self.usages or (None,) * count
        _set(self, "usages", tuple(None if u is None else np.asarray(u, dtype=np.float64) for u in usages))
        _set(self, "intervals", tuple(self.intervals) or (None,) * count)
        _check(self)

    def __len__(self) -> int:
        return len(self.node_costs)

    def name(self, node: int) -> str:
        """The node's name, or `node <index>` where the problem has no names."""
        return self.node_names[node] if self.node_names else f"node {node}"

    def evaluate(self, choices: Sequence[int] | IntArray) -> float:
        """E(x), the cost of one strategy per node: `inf` if a choice is forbidden or a hard row exceeded; ignores the memory limit."""
        nodes = sum(float(c[x]) for c, x in zip(self.node_costs, choices, strict=True))
        pairs = zip(self.edges, self.edge_costs, strict=True)
        shared = sum(transfer.cost(choices) for transfer in self.transfers)
        rows = sum(row.penalty(total) for row, total in zip(self.rows, self.totals(choices), strict=True))
        return nodes + sum(float(c[choices[i], choices[j]]) for (i, j), c in pairs) + shared + rows

    def totals(self, choices: Sequence[int] | IntArray) -> list[float]:
        """The sum of each row."""
        return [
            sum(float(weights[choices[node]]) for node, weights in row.nodes)
            + sum(self.transfers[index].sum(weights, choices) for index, weights in row.transfers)
            for row in self.rows
        ]

    def peak(self, choices: Sequence[int] | IntArray) -> float:
        """The largest memory in use at any time, bytes."""
        return self.over_time(choices).peak()[1]

    def over_time(self, choices: Sequence[int] | IntArray) -> Timeline:
        """The memory in use, bytes."""
        lives = self.all_lives
        return Timeline.of([(live.lo, live.hi) for live in lives], [live.total(self.transfers, choices) for live in lives])

    @property
    def all_lives(self) -> tuple[Live, ...]:
        """All uses of memory: usages over their intervals, and lives."""
        usages = enumerate(zip(self.usages, self.intervals, strict=True))
        own = [Live(span[0], span[1], usage, node) for node, (usage, span) in usages if usage is not None and span is not None]
        return tuple(live for live in (*own, *self.lives) if live.lo < live.hi)

    def feasible(self, choices: Sequence[int] | IntArray) -> bool:
        """Whether every choice is allowed and the memory limit holds."""
        if not np.isfinite(self.evaluate(choices)):
            return False
        return self.usage_limit is None or self.peak(choices) <= usage_ceiling(self.usage_limit)

    def without_costs(self) -> PlacementProblem:
        """The problem with every finite cost 0, which keeps only its constraints."""

        def free(costs: FloatArray) -> FloatArray:
            return np.where(np.isinf(costs), np.inf, 0.0)

        return replace(
            self,
            node_costs=tuple(map(free, self.node_costs)),
            edge_costs=tuple(map(free, self.edge_costs)),
            transfers=tuple(replace(t, prices=free(t.prices)) for t in self.transfers),
            rows=tuple(row for row in self.rows if row.hard),
        )

    @classmethod
    def read(cls, path: str | Path) -> PlacementProblem:
        """The problem in an IOPDDL file, gzipped or not; costs of 1e15 and more become `inf`."""
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = _unpacked(data)
        return _from_json(json.loads(data)["problem"])

    def write(self, path: str | Path) -> None:
        """Write it as IOPDDL, gzipped where the name ends in `.gz`; integers stay integers, `inf` becomes 10^18.

        Raises ValueError for a problem with transfers, lives or rows, which the format lacks.
        """
        if self.transfers:
            raise ValueError(f"IOPDDL knows edges only, not the {len(self.transfers)} transfers of this problem")
        if self.lives or self.rows:
            raise ValueError(f"IOPDDL has no place for the {len(self.lives)} further lives and {len(self.rows)} rows of this problem")
        text = json.dumps({"problem": _to_json(self, Path(path).name.split(".")[0])}).encode()
        Path(path).write_bytes(gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


Shapes = list[tuple[int, ...]]


def usage_ceiling(limit: float) -> float:
    """The largest sum of usages that counts as within `limit`."""
    return limit + USAGE_TOLERANCE * abs(limit)


def _set(problem: PlacementProblem, field: str, value: object) -> None:
    object.__setattr__(problem, field, value)


def _check(problem: PlacementProblem) -> None:
    """Raises ValueError with the index of the first array that does not match the others."""
    count, ranges = len(problem), _Ranges()
    for field in ("usages", "intervals"):
        if len(getattr(problem, field)) != count:
            raise ValueError(f"{field} has {len(getattr(problem, field))} entries for {count} nodes")
    if problem.node_names and len(problem.node_names) != count:
        raise ValueError(f"node_names has {len(problem.node_names)} entries for {count} nodes")
    for node, (costs, usage) in enumerate(zip(problem.node_costs, problem.usages, strict=True)):
        if costs.ndim != 1:
            raise ValueError(f"node_costs[{node}] has shape {costs.shape}, not one dimension")
        _check_numbers(ranges, costs, f"node_costs[{node}]")
        if usage is not None and (usage.shape != costs.shape or not bool(np.all((usage >= 0) & (usage < np.inf)))):
            raise ValueError(f"usages[{node}] must be {costs.shape[0]} finite numbers >= 0")
    if len(problem.edges) != len(problem.edge_costs):
        raise ValueError(f"{len(problem.edges)} edges but {len(problem.edge_costs)} edge_costs")
    for index, ((i, j), costs) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        if not (0 <= i < count and 0 <= j < count):
            raise ValueError(f"edges[{index}] = {(i, j)} names a node that does not exist ({count} nodes)")
        expected = (len(problem.node_costs[i]), len(problem.node_costs[j]))
        if costs.shape != expected:
            raise ValueError(f"edge_costs[{index}] of edge {(i, j)} has shape {costs.shape}, expected {expected}")
        _check_numbers(ranges, costs, f"edge_costs[{index}]")
    for index, transfer in enumerate(problem.transfers):
        _check_transfer(problem, ranges, transfer, f"transfers[{index}]")
    shapes = [c.shape for c in problem.node_costs], [t.prices.shape for t in problem.transfers]
    for index, live in enumerate(problem.lives):
        _check_weights(shapes, live.node, live.transfer, live.amount, f"lives[{index}]")
        if live.amount.min(initial=0.0) < 0:
            raise ValueError(f"lives[{index}] has a negative amount")
    for index, row in enumerate(problem.rows):
        if not row.slope >= 0 or not np.isfinite(row.limit):
            raise ValueError(f"rows[{index}] needs a finite limit and a slope >= 0, has {row.limit} and {row.slope}")
        for node, weights in row.nodes:
            _check_weights(shapes, node, -1, weights, f"rows[{index}]")
        for transfer_index, weights in row.transfers:
            _check_weights(shapes, -1, transfer_index, weights, f"rows[{index}]")
            if weights.min(initial=0.0) < 0:
                raise ValueError(f"rows[{index}] has a negative weight at transfer {transfer_index}")


def _check_transfer(problem: PlacementProblem, ranges: _Ranges, transfer: Transfer, where: str) -> None:
    _check_numbers(ranges, transfer.prices, f"{where}.prices")
    if transfer.prices.ndim != 2 or ranges.of(transfer.prices)[0] < 0:
        raise ValueError(f"{where}.prices must be a table of costs >= 0")
    ends = [(transfer.source, transfer.have, 0), *((node, want, 1) for node, want in transfer.readers)]
    for node, layouts, axis in ends:
        if not 0 <= node < len(problem) or layouts.shape != problem.node_costs[node].shape:
            raise ValueError(f"{where} names node {node}, which does not exist or whose states are not of shape {layouts.shape}")
        least, most = ranges.of(layouts)
        if least < 0 or most >= transfer.prices.shape[axis]:
            raise ValueError(f"{where} names a layout at node {node} that prices of shape {transfer.prices.shape} do not have")
    if not transfer.readers or transfer.source in {node for node, _ in transfer.readers}:
        raise ValueError(f"{where} needs readers other than its source, node {transfer.source}")


def _check_weights(shapes: tuple[Shapes, Shapes], node: int, transfer: int, weights: FloatArray, where: str) -> None:
    """shapes: the expected shapes of weights, per node and per transfer."""
    index, known = (node, shapes[0]) if node >= 0 else (transfer, shapes[1])
    if not 0 <= index < len(known) or weights.shape != known[index] or not bool(np.isfinite(weights).all()):
        what = f"node {node}" if node >= 0 else f"transfer {transfer}"
        raise ValueError(f"{where} needs one finite number for each state of {what}, which must exist")


class _Ranges:
    """The least and the largest entry of arrays, 0 included; reads each array once, since repeated layers share arrays."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}

    def of(self, array: FloatArray | IntArray) -> tuple[float, float]:
        if id(array) not in self._known:
            self._known[id(array)] = float(array.min(initial=0)), float(array.max(initial=0))
        return self._known[id(array)]


def _check_numbers(ranges: _Ranges, costs: FloatArray, where: str) -> None:
    if not ranges.of(costs)[0] > -np.inf:  # catches nan as well
        raise ValueError(f"{where} contains nan or -inf; a cost is finite or inf")


SMALL, MAX_RATIO = 2**24, 100
"""Bytes up to which a gzipped file may be of any ratio of compression, and the largest ratio of others."""


def _unpacked(data: bytes) -> bytes:
    """The text in a gzipped file; raises ValueError for one that is compressed more than any problem is."""
    limit = max(SMALL, MAX_RATIO * len(data))
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it is absurdly large: unpacked, more than {limit} bytes")
    return text


def _from_json(data: dict[str, Any]) -> PlacementProblem:
    nodes, edges = data["nodes"], data["edges"]
    costs = [_read_costs(c) for c in nodes["costs"]]
    intervals = [(int(v[0]), int(v[1])) if v else None for v in nodes["intervals"]]
    usages = [np.asarray(u, dtype=np.float64) if u else None for u in nodes["usages"]]
    pairs = [(int(p[0]), int(p[1])) for p in edges["nodes"]]
    shapes = [(len(costs[i]), len(costs[j])) for i, j in pairs]
    tables = [_read_costs(c).reshape(shape) for shape, c in zip(shapes, edges["costs"], strict=True)]
    limit = data.get("usage_limit")
    return PlacementProblem(
        tuple(costs), tuple(pairs), tuple(tables), tuple(usages), tuple(intervals),
        None if limit is None else float(limit), tuple(nodes.get("names", ())),
    )  # fmt: skip


def _read_costs(values: list[float]) -> FloatArray:
    costs = np.asarray(values, dtype=np.float64)
    return np.where(costs >= FORBIDDEN, np.inf, costs)


def _to_json(problem: PlacementProblem, name: str) -> dict[str, Any]:
    nodes: dict[str, Any] = {
        "intervals": [[] if v is None else list(v) for v in problem.intervals],
        "costs": [_numbers(c) for c in problem.node_costs],
        "usages": [[] if u is None else _numbers(u) for u in problem.usages],
    }
    if problem.node_names:
        nodes["names"] = list(problem.node_names)
    edges = {"nodes": [list(p) for p in problem.edges], "costs": [_numbers(c.ravel()) for c in problem.edge_costs]}
    data: dict[str, Any] = {"name": name, "nodes": nodes, "edges": edges}
    if problem.usage_limit is not None:
        data["usage_limit"] = _numbers(np.asarray([problem.usage_limit]))[0]
    return data


def _numbers(values: FloatArray) -> list[int | float]:
    finite = np.where(np.isinf(values), 1e18, values)
    return [int(v) if v.is_integer() else v for v in finite.tolist()]
