"""Compares, in one setting, the formula, the known plan (its layouts pinned) and the plan that the solver finds without pins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

import fxshard
from bench.known_plans.formulas import Sizes, Term
from bench.known_plans.layouts import KnownLayouts
from examples.llama import Llama
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.constraints import Constraint

Traffic = dict[tuple[str, str], tuple[int, int]]
"""(kind, axis) -> the number of collectives, and the bytes that a rank sends in them."""
PROVEN = 1e-6
"""Relative tolerance of costs, which are sums of many floats in different orders."""


@dataclass(frozen=True)
class Setting:
    """A setting in which a known plan is best: a Llama's training step, a mesh, the layout of its tokens, and a memory limit.

    ``inputs``: the layout of tokens and targets; ``memory_limit``: bytes, None for no limit; ``terms``: the formula; ``constraints``: those
    of both plans.
    """

    name: str
    best: str
    sizes: Sizes
    mesh: fxshard.Mesh
    inputs: str
    layouts: KnownLayouts
    terms: tuple[Term, ...]
    objective: str = "time"
    memory_limit: int | None = None
    optimizer: str = "none"
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True)
class Compared:
    """``known`` and ``found``: the plan with the known layouts pinned, and the one without."""

    setting: Setting
    known: fxshard.ShardingPlan
    found: fxshard.ShardingPlan

    @property
    def formula(self) -> Traffic:
        return _sum((t.kind, t.axis, t.count, t.bytes) for t in self.setting.terms)

    @property
    def exact(self) -> bool:
        """Whether the known plan sends as the formula says: the same number of collectives and bytes, by kind and axis."""
        return traffic(self.known) == self.formula

    @property
    def no_worse(self) -> bool:
        """Whether the plan found costs at most as much as the known plan."""
        return self.found.objective <= self.known.objective * (1 + PROVEN)


def compared(setting: Setting) -> Compared:
    """Plans the setting with and without the known layouts."""
    graph = traced(setting.sizes)
    pins = setting.layouts.pins(graph)
    return Compared(setting, _planned(graph, setting, pins), _planned(graph, setting, None))


def traced(sizes: Sizes) -> PlanningGraph:
    """The training graph of a Llama in bfloat16 with its loss; the inputs are tokens and targets."""
    with torch.device("meta"):
        model = Llama(sizes.config).to(torch.bfloat16)
        tokens = torch.empty(sizes.batch, sizes.length, dtype=torch.int64)
    return trace(model, (tokens, tokens))


def _planned(graph: PlanningGraph, setting: Setting, pins: dict[str, str] | None) -> fxshard.ShardingPlan:
    request = Request(
        input_layouts=setting.inputs,
        output_layouts="R" * setting.mesh.ndim,
        pins=pins,
        memory_limit=setting.memory_limit,
        objective=setting.objective,
        optimizer=setting.optimizer,
        constraints=setting.constraints,
        cache=False,
    )
    return plan_graph(graph, setting.mesh, request)


def traffic(plan: fxshard.ShardingPlan) -> Traffic:
    return _sum((c.kind, c.axis, 1, c.bytes) for c in plan.collectives)


def _sum(entries: Iterable[tuple[str, str, int, int]]) -> Traffic:
    found: Traffic = {}
    for kind, axis, count, size in entries:
        before = found.get((kind, axis), (0, 0))
        found[kind, axis] = (before[0] + count, before[1] + size)
    return dict(sorted(found.items()))
