"""Formulation: the placement problem of a graph, and what its variables mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxshard.graph.planning_graph import producer
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price
from fxshard.passes.annotation.recompute import Block
from fxshard.passes.memory.memory_use import Kept, Reader
from fxshard.plans.plan_data import OpSpec
from fxshard.solver import PlacementProblem

Decisions = Mapping[Any, tuple[int, tuple[Any, ...]]]
"""Of nodes or results -> (variable, what its states stand for)."""


@dataclass(frozen=True)
class Formulation:
    """The problem and the meaning of its variables.

    ``node_vars``: node -> (variable, specs); ``result_vars``: output index -> (variable, layouts).
    """

    problem: PlacementProblem
    node_vars: Mapping[str, tuple[int, tuple[OpSpec, ...]]]
    result_vars: Mapping[int, tuple[int, tuple[Layout, ...]]]
    readers: Mapping[str, tuple[Reader, ...]]
    price: Price
    unit: str
    start: tuple[int, ...] = ()
    """A feasible choice to start from: replicated except where the constraints ask for something else."""
    blocks: Mapping[int, Block] = field(default_factory=dict)
    """Variable -> the block that it decides on: 1 if the block is recomputed."""
    kept: tuple[Kept, ...] = ()
    times: Mapping[str, int] = field(default_factory=dict)
    """Time at which each node runs, second runs included; empty without a memory limit."""
    relaxed: PlacementProblem | None = None
    """The same problem with memory counted from below: a bound on it bounds every plan within the limit."""
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Variable of a parameter that may be on the host -> the place of each of its states."""

    def starting_from(self, other: Formulation, choices: Sequence[int]) -> Formulation:
        """The problem with a start that has the specs and results of another problem's ``choices``: of the same graph without a memory
        limit. Values are saved for the backward as they are produced, and nothing is recomputed or on the host."""
        allowed: dict[int, set[int]] = {}
        decisions: list[tuple[Decisions, Decisions]] = [(self.node_vars, other.node_vars), (self.result_vars, other.result_vars)]
        for mine, theirs in decisions:
            for name, (var, options) in mine.items():
                its, known = theirs[name]
                same = {state for state, option in enumerate(options) if option == known[choices[its]]}
                allowed[var] = allowed.get(var, same) & same
        if not all(allowed.values()):
            return self
        start = [min(allowed.get(var, {state})) for var, state in enumerate(self.start)]
        for one in self.kept:
            if one.layouts[start[one.var]] is not None:
                source, output = producer(one.crossing.value)
                var, specs = self.node_vars[source.name]
                start[one.var] = one.layouts.index(specs[start[var]].outputs[output])
        return replace(self, start=tuple(start))
