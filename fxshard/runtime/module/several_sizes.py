"""Sizes other than the example's: those for which the plans of a parallelized module are optimised, and those that exceed its memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from fxshard.cost.optimizer_state import Optimizer
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.module.module_program import ModuleProgram
from fxshard.shapes import DynamicDim, WeightedSizes, first_broken, sizes_named
from fxshard.sizes import size_text

log = logging.getLogger("fxshard")


def sampled_sizes(
    asked: Sequence[WeightedSizes], graph: PlanningGraph, here: Sequence[DynamicDim] = (), *, first: bool
) -> tuple[WeightedSizes, ...]:
    """The sizes for which to optimise the plan of ``graph``: those ``asked`` for, with the example's for dims that they do not name.

    ``here``: the dims that the user named and the call has. Of those that are static in ``graph``, the call's size alone counts; dims that
    the call does not have do not count. A program after the ``first`` serves calls that the first does not: of the sizes only those at
    which its guards hold count, if any.
    """
    family = graph.family
    if family is None:
        return ()
    static = {dim.name: dim.example for dim in here if dim.name not in family.example}
    weights: dict[tuple[tuple[str, int], ...], float] = {}
    for one in asked:
        sizes = {**family.example, **{name: size for name, size in one.sizes if name in family.example}}
        fits = all(static.get(name, size) == size for name, size in one.sizes)
        if fits and (first or first_broken(family.guards, sizes) is None):
            key = tuple(sizes.items())
            weights[key] = weights.get(key, 0.0) + one.weight
    total = math.fsum(weights.values())
    return tuple(WeightedSizes(sizes, weight / total) for sizes, weight in weights.items())


def unused_sizes_text(asked: Sequence[WeightedSizes], graph: PlanningGraph, here: Sequence[DynamicDim]) -> str | None:
    """Which of the sizes ``asked`` for do not count because a dim is static in ``graph``; None if all count. ``here``: as above."""
    known = {} if graph.family is None else graph.family.example
    static = [dim for dim in here if dim.name not in known]
    lost = [one for one in asked if any(dict(one.sizes).get(dim.name, dim.example) != dim.example for dim in static)]
    if not lost:
        return None
    sizes = "; ".join(sizes_named(one.sizes) for one in lost)
    return f"{sizes}: this program is for {', '.join(f'{dim.name}={dim.example} ({dim})' for dim in static)} alone"


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
