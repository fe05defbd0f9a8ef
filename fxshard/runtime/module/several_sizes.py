"""Sizes other than the example's: those for which the plans of a parallelized module are optimised, and those that exceed its memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from fxshard.byte_sizes import size_text
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.module.module_program import ModuleProgram
from fxshard.shapes import DynamicDim, WeightedSizes, first_broken, sizes_named

log = logging.getLogger("fxshard")


def sampled_sizes(
    asked: Sequence[WeightedSizes], graph: PlanningGraph, here: Sequence[DynamicDim] = (), *, first: bool
) -> tuple[WeightedSizes, ...]:
    """The sizes for which to optimise the plan of ``graph``: those ``asked`` for, with the example's size for dims that they do not name.

    ``here``: the dims that the user named and that the call has; other dims are ignored. Sizes at which a dim that is static in ``graph``
    has another size than in this call are left out. A program after the ``first`` serves calls that the first does not, so sizes at which
    its guards do not hold are left out too.
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
    """Which of the sizes ``asked`` for are left out because a dim is static in ``graph``; None if none is. ``here``: as above."""
    known = {} if graph.family is None else graph.family.example
    static = [dim for dim in here if dim.name not in known]
    lost = [one for one in asked if any(dict(one.sizes).get(dim.name, dim.example) != dim.example for dim in static)]
    if not lost:
        return None
    sizes = "; ".join(sizes_named(one.sizes) for one in lost)
    return f"{sizes}: this program is for {', '.join(f'{dim.name}={dim.example} ({dim})' for dim in static)} alone"


def warn_beyond_limit(made: ModuleProgram, leaves: Sequence[Any], optimizer: Any, warned: set[Runner]) -> None:
    """Warns, once per program, that a call exceeds the memory limit of its plan, by the plan's own memory model.

    Does nothing for a call without a size above those at which the plan is known to keep its limit.
    """
    plan, sizes = made.runner.program.plan, made.runner.sizes_of(leaves)
    limit, known = plan.memory_limit, plan.memory_sizes
    if limit is None or made.runner in warned or all(size <= known.get(name, size) for name, size in sizes.items()):
        return
    from fxshard.passes.planning.price_regret.repriced import memory_at  # imports the solver, which most processes do not need

    taken = memory_at(plan, made.graph, sizes, Optimizer.of(optimizer))
    if taken > limit:
        warned.add(made.runner)
        text = "a call at %s takes %s per device, more than memory_limit=%s, which holds at %s; with a max for the Dim, it holds up to that"
        log.warning(text, sizes_named(sizes), size_text(taken), size_text(limit), sizes_named(known))
