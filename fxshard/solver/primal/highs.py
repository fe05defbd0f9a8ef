"""Solve the remaining model with HiGHS, as a mixed-integer program over the local polytope.

One binary per state; one continuous variable per allowed pair, whose sums over either end equal the states' binaries
(Wainwright and Jordan 2008); one row per limit, with a variable for the overrun where the limit is soft. The relaxation is usually tight
where memory does not bind. HiGHS proves bounds with float tolerances (1e-9 requested); the plan itself is priced exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fxshard.solver.problem.arrays import FloatArray, IntArray, starts
from fxshard.solver.problem.budget import Budget
from fxshard.solver.problem.model import Model

if TYPE_CHECKING:
    import highspy  # imported in the functions that call it, since most plans never need it

OBJECTIVE_RANGE = 1e6
"""The range between bound and cutoff is scaled to at most this, for which HiGHS' absolute tolerances are fine enough."""

LEAST_UNIT = 1e-6
"""Least coefficient of an overrun variable: HiGHS drops coefficients below 1e-9."""

NODE_WORK = 50.0
ITERATION_WORK = 10.0
"""Work charged for a node of the search tree and for a simplex iteration, per entry of the matrix."""

ITERATIONS = 0.1
"""Approximate number of simplex iterations per entry of the matrix (measured on IOPDDL V)."""

MOST_ENTRIES = 20_000_000
"""The most entries of a matrix: about a gigabyte."""


@dataclass(frozen=True)
class Answer:
    """choices: the cheapest found, None if none. bound: a lower bound on choices that fit and cost less than the cutoff (`inf`: none)."""

    choices: IntArray | None
    bound: float


@dataclass(frozen=True)
class _Columns:
    """Sparse matrix entries and the objective, gathered node by node and edge by edge."""

    cost: FloatArray
    binaries: int
    most: FloatArray
    row: IntArray
    column: IntArray
    value: FloatArray
    lower: FloatArray
    upper: FloatArray


def too_large(model: Model, budget: Budget) -> bool:
    """Whether the matrix is too large, or its relaxation likely to take more work than is left; only a time limit can interrupt HiGHS."""
    entries = 3.0 * sum(int(np.isfinite(table).sum()) for table in model.edges.values())
    entries += sum(int(np.count_nonzero(use.amount)) * (use.hi - use.lo) for uses in model.uses for use in uses)
    work = ITERATION_WORK * ITERATIONS * entries**2  # iterations grow as the entries do
    return entries > MOST_ENTRIES or (budget.work_left is not None and work > budget.work_left)


def solve_mip(model: Model, budget: Budget) -> Answer:
    """Solve the model to optimality below its cutoff, or until the budget ends."""
    import highspy

    columns = _columns(model)
    room = model.cutoff - model.constant
    largest = columns.cost[np.isfinite(columns.cost)].max(initial=1.0)
    spread = room if np.isfinite(room) else float(largest)
    scale = min(1.0, OBJECTIVE_RANGE / max(spread, 1.0))
    tables = len(model) + len(model.edges)
    # total rounding error below a sixteenth of the grain
    quantum = float(2.0 ** np.floor(np.log2(model.grain * scale / (8 * tables))))
    highs = _load(columns, columns.cost * scale, quantum)
    highs.setOptionValue("mip_abs_gap", 0.5 * model.grain * scale)
    highs.setOptionValue("mip_rel_gap", 0.0)
    if np.isfinite(room):  # half a grain above the relevant costs and half a grain below the known plan
        highs.setOptionValue("objective_bound", (room - 1 + 0.5 * model.grain) * scale)
    if budget.late:
        return Answer(None, -np.inf)
    if budget.seconds_left is not None:
        highs.setOptionValue("time_limit", max(0.1, budget.seconds_left))
    node_work = NODE_WORK * len(columns.row) + 1
    if budget.work_left is not None:
        highs.setOptionValue("mip_max_nodes", int(budget.work_left / node_work))
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    budget.charge(max(0, info.simplex_iteration_count) * ITERATION_WORK * len(columns.row))
    budget.charge((max(0, info.mip_node_count) + 1) * node_work)  # spends the budget if the node limit ended the search
    if status == highspy.HighsModelStatus.kInfeasible:
        return Answer(None, np.inf)
    choices = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        choices = _choices(model, np.asarray(highs.getSolution().col_value))
    if status == highspy.HighsModelStatus.kOptimal and choices is not None:
        # A solution above the cutoff is also reported as optimal, though HiGHS did not search there.
        return Answer(choices, min(model.evaluate(choices) - model.grain + 1, model.cutoff))
    dual = float(info.mip_dual_bound)
    bound = model.constant + dual / scale - 1e-6 * abs(dual / scale) if np.isfinite(dual) else -np.inf
    return Answer(choices, min(bound, model.cutoff))


def _choices(model: Model, values: FloatArray) -> IntArray:
    offset = np.concatenate([[0], np.cumsum([len(cost) for cost in model.costs])])
    return np.asarray([int(values[a:b].argmax()) for a, b in pairwise(offset)], dtype=np.int64)


def _load(columns: _Columns, cost: FloatArray, quantum: float) -> highspy.Highs:
    import highspy

    lp = highspy.HighsLp()
    count, rows = len(columns.cost), len(columns.lower)
    lp.num_col_, lp.num_row_ = count, rows
    allowed = np.isfinite(cost)  # HiGHS crashes on an infinite cost
    lp.col_cost_ = np.rint(np.where(allowed, cost, 0.0) / quantum) * quantum
    lp.col_lower_, lp.col_upper_ = np.zeros(count), np.where(allowed, columns.most, 0.0)
    lp.row_lower_, lp.row_upper_ = columns.lower, columns.upper
    by_column = np.argsort(columns.column, kind="stable")
    starts = np.searchsorted(columns.column[by_column], np.arange(count + 1))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = starts.astype(np.int32)
    lp.a_matrix_.index_ = columns.row[by_column].astype(np.int32)
    lp.a_matrix_.value_ = columns.value[by_column]
    kinds = [highspy.HighsVarType.kInteger] * columns.binaries
    lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (count - columns.binaries)
    highs = loaded(lp)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
    highs.setOptionValue("primal_feasibility_tolerance", 1e-9)
    return highs


def loaded(lp: highspy.HighsLp) -> highspy.Highs:
    """A HiGHS instance with a program loaded, without output and on one thread."""
    import highspy

    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy has no types
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.passModel(lp)
    return highs


def _columns(model: Model) -> _Columns:
    """The program's matrix; rows: one per node, then one per end and state of each edge, then the limits."""
    sizes = np.asarray([len(cost) for cost in model.costs], dtype=np.int64)
    offset = starts(sizes)
    states, nodes = int(offset[-1]), len(model)
    costs = list(model.costs)
    row, column = [np.repeat(np.arange(nodes), sizes)], [np.arange(states)]
    value = [np.ones(states)]
    next_row, next_column = nodes, states
    for (i, j), table in model.edges.items():
        a, b = np.nonzero(np.isfinite(table))
        pairs = next_column + np.arange(len(a))
        ends = next_row + np.arange(sizes[i] + sizes[j])
        row += [next_row + a, next_row + sizes[i] + b, ends]
        states_of = [np.arange(offset[n], offset[n + 1]) for n in (i, j)]
        column += [pairs, pairs, np.concatenate(states_of)]
        value += [np.ones(2 * len(a)), -np.ones(len(ends))]
        costs.append(table[a, b])
        next_row, next_column = next_row + len(ends), next_column + len(a)
    limits = _memory(model, offset, next_row, row, column, value)
    costs += _overruns(model, next_row, next_column, row, column, value)
    zero = np.zeros(next_row - nodes)
    return _Columns(
        np.concatenate(costs),
        states,
        np.concatenate([np.ones(next_column), np.full(int(np.isfinite(model.slopes).sum()), np.inf)]),
        np.concatenate(row),
        np.concatenate(column),
        np.concatenate(value),
        np.concatenate([np.ones(nodes), zero, np.full(len(limits), -np.inf)]),
        np.concatenate([np.ones(nodes), zero, limits]),
    )


def _memory(
    model: Model, offset: IntArray, first_row: int, row: list[IntArray], column: list[IntArray], value: list[FloatArray]
) -> FloatArray:
    """Append the model's rows, each divided by its limit; returns their right-hand sides."""
    scale = _row_scale(model)
    for node, uses in enumerate(model.uses):
        if uses:
            low, high = min(use.lo for use in uses), max(use.hi for use in uses)
            used = np.zeros((len(model.costs[node]), high - low))
            for use in uses:  # summed first, since HiGHS hangs on duplicate entries
                used[:, use.lo - low : use.hi - low] += use.amount[:, None]
            state, time = np.nonzero(used)
            row.append(first_row + low + time)
            column.append(offset[node] + state)
            value.append(scale[low + time] * used[state, time])
    return np.asarray(model.limits * scale)


def _overruns(
    model: Model, first_row: int, first_column: int, row: list[IntArray], column: list[IntArray], value: list[FloatArray]
) -> list[FloatArray]:
    """Append an overrun variable per row with a finite slope; returns the costs of these variables."""
    soft = np.flatnonzero(np.isfinite(model.slopes))
    rate = model.slopes[soft] / _row_scale(model)[soft]
    room = model.cutoff - model.constant
    unit = np.clip(max(room, 1.0) / np.maximum(rate, 1.0), LEAST_UNIT, 1.0)
    row.append(first_row + soft)
    column.append(first_column + np.arange(len(soft)))
    value.append(-unit)
    return [unit * rate]


def _row_scale(model: Model) -> FloatArray:
    return np.asarray(1.0 / np.maximum(np.abs(model.limits), 1.0))
