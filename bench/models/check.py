"""One model on simulated meshes: the solver's plan and random ones, in float64, against one device."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from bench.families.rows import kept_whole
from bench.models.catalogue import make
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import Reference, assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

MESHES = ("a=4", "a=2,b=2", "a=2,b=2,c=2")
SEEDS = (0, 1)
TIME_LIMIT = 15.0
"""Seconds for the solver; a plan that is not proven by then has a gap."""
SLOW = Hardware("slow", {1: 1e9, 2: 1e9, 4: 1e9, 8: 1e9}, 1e10, 0.0, 64, Link(1e9, 0.0), Link(1e9, 0.0))
"""Slow products beside links without latency: sharding pays even for tiny models, so that the solver's plans have collectives."""

Record = dict[str, Any]


def check(name: str) -> Record:
    """What happened to the model ``name``: ``nodes``, ``trace`` in seconds, ``whole`` (operators that stay replicated though they have
    something to shard), and a list of ``cells``. A cell has its mesh and plan, the seconds to plan and to simulate, the gap, and ``error``,
    which is empty if all numbers equal one device's to 1e-9."""
    warnings.simplefilter("ignore")
    found: Record = {"key": name, "nodes": 0, "trace": 0.0, "whole": [], "error": "", "cells": []}
    began = time.perf_counter()
    try:
        case = make(name)
        reference = _one_device(*case)
        began = time.perf_counter()
        graph = trace(*case)
    except Exception as error:
        return found | {"error": _said(error)}
    found |= {"nodes": len(list(graph.nodes)), "trace": time.perf_counter() - began, "whole": _whole(graph)}
    for mesh in MESHES:
        for plan, cell in _plans(graph, parse_mesh(mesh, SLOW)):
            cell = {"mesh": mesh, **cell}
            if plan is not None:
                began = time.perf_counter()
                cell["error"] = _compare(graph, plan, case, reference)
                cell["simulate"] = time.perf_counter() - began
            found["cells"].append(cell)
    return found


def _plans(graph: PlanningGraph, mesh: Mesh) -> Iterator[tuple[ShardingPlan | None, Record]]:
    annotated = None
    for seed in (None, *SEEDS):
        began = time.perf_counter()
        cell: Record = {"plan": "solver" if seed is None else f"random {seed}", "gap": None, "simulate": 0.0, "collectives": 0, "error": ""}
        plan = None
        try:
            if seed is None:
                plan = plan_graph(graph, mesh, Request(time_limit=TIME_LIMIT))
                cell["gap"] = plan.gap
            else:
                annotated = annotated or annotate(graph, mesh)
                plan = random_graph_plan(annotated, seed)
            cell["collectives"] = len(plan.collectives)
        except Exception as error:
            cell["error"] = _said(error)
        yield plan, cell | {"seconds": time.perf_counter() - began}


def _compare(
    graph: PlanningGraph, plan: ShardingPlan, case: tuple[nn.Module, tuple[Any, ...], dict[str, Any]], reference: Reference
) -> str:
    try:
        program = lower_plan(graph, plan)
        assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)
    except Exception as error:
        return _said(error)
    return ""


def _one_device(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reference:
    return one_device(plain_copy(model), args, kwargs)


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy in which experts run one by one with plain products."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        set_experts: Callable[[str], None] | None = getattr(module, "set_experts_implementation", None)
        if set_experts is not None:
            set_experts("eager")
    return plain


def _whole(graph: PlanningGraph) -> list[str]:
    """Operators without a rule, and those whose rule only replicates a call with something to shard."""
    annotated = [annotate(graph, parse_mesh(mesh)) for mesh in ("a=2", "a=2,b=2")]
    lacking = {a.calls[node].op for a in annotated for node, _ in a.fallbacks}
    return sorted(op.removeprefix("aten.").removesuffix(".default") for op in {*lacking, *kept_whole(annotated)})


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
