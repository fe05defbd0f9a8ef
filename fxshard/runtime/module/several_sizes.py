"""Sizes other than the example's: those for which the plans of a parallelized module are optimised, and those that exceed its memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fxshard.cost.optimizer_state import Optimizer
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.module.module_program import ModuleProgram
from fxshard.shapes import WeightedSizes, first_broken, sizes_named
from fxshard.sizes import size_text

log = logging.getLogger("fxshard")


def sampled_sizes(asked: Sequence[WeightedSizes], graph: PlanningGraph, *, first: bool) -> tuple[WeightedSizes, ...]:
    """The sizes for which to optimise the plan of ``graph``: those ``asked`` for, with the example's for dims that they do not name.

    A program after the ``first`` serves calls that the first does not: of the sizes only those at which its guards hold count, if any.
    """
    family = graph.family
    if family is None or not asked or not {name for name, _ in asked[0].sizes} <= family.example.keys():
        return ()
    found = [replace(one, sizes=tuple({**family.example, **dict(one.sizes)}.items())) for one in asked]
    kept = found if first else [one for one in found if first_broken(family.guards, dict(one.sizes)) is None]
    total = math.fsum(one.weight for one in kept)
    return tuple(replace(one, weight=one.weight / total) for one in kept)


def warn_beyond_limit(made: ModuleProgram, leaves: Sequence[Any], optimizer: Any, warned: set[Runner]) -> None:
    """Warns, once per program, that a call takes more than the memory limit of its plan, by the plan's own memory model.

    Calls without a size larger than those at which the limit is known to hold are not counted.
    """
    plan, sizes = made.runner.program.plan, made.runner.sizes_of(leaves)
    limit, known = plan.memory_limit, plan.memory_sizes
    if limit is None or made.runner in warned or all(size <= known.get(name, size) for name, size in sizes.items()):
        return
    from fxshard.passes.planning.repriced import memory_at  # imports the solver, which most processes do not need

    taken = memory_at(plan, made.graph, sizes, Optimizer.of(optimizer))
    if taken > limit:
        warned.add(made.runner)
        text = "a call at %s takes %s per device, more than memory_limit=%s, which holds at %s; give its Dim a max, and it holds there"
        log.warning(text, sizes_named(sizes), size_text(taken), size_text(limit), sizes_named(known))
