"""Formulation: the placement problem of a graph, and what its variables mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price
from fxshard.passes.annotation.recompute import Block
from fxshard.passes.memory.memory_use import Kept, Reader
from fxshard.plans.plan_data import OpSpec
from fxshard.solver import PlacementProblem


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
