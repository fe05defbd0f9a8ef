"""Asks a plan for dynamic dims what it costs at other sizes, and what the best plan costs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fxshard.errors import ConstraintError, OptionError, SizesError, closest
from fxshard.passes.annotate import Annotated, annotate
from fxshard.passes.choose import allowance, decide, solved
from fxshard.passes.constrain import Constraints
from fxshard.passes.formulate import formulate
from fxshard.plan_at import PlanAt
from fxshard.shapes import DynamicDim, broken
from fxshard.sharding_plan import ShardingPlan


def plan_at(
    plan: ShardingPlan,
    annotated: Annotated,
    constraints: Constraints,
    objective: str,
    time_limit: float | None,
    sizes: Mapping[str, int],
) -> PlanAt:
    """``plan`` at ``sizes``, by name; those that are not named are as in the example.

    Raises OptionError for a name or a size that cannot be, SizesError where the plan is not legal at these sizes.
    """
    family = annotated.graph.family
    if family is None:
        raise OptionError("the plan has no dynamic dims", remedy="plan with dynamic_shapes={'args[0]': {0: 'batch'}}")
    there = {**family.example, **_checked(sizes, {dim.name: dim for dim in family.dims})}
    guard = broken(family.guards, there)
    if guard is not None:
        raise SizesError(f"the plan does not serve {dict(there)}: the model takes for granted that {guard}", remedy="plan for these sizes")
    graph = replace(annotated.graph, module=family.at(there), family=None)
    other = annotate(graph, annotated.mesh)
    free = replace(constraints, memory_limit=None)
    known = {node.name for node in graph.nodes}
    pinned = replace(free, specs={n: s for n, s in plan.specs.items() if n in known}, recomputed=frozenset(plan.recomputed))
    solve = partial(_plan, other, objective=objective, time_limit=time_limit)
    try:
        own = solve(pinned)
    except ConstraintError as error:
        where = ", ".join(f"{name}={size}" for name, size in there.items())
        raise SizesError(f"the plan is not legal at {where}: {error.what}", where=error.where, remedy="plan for these sizes") from error
    best = solve(free)
    bound = min(best.lower_bound, own.objective)
    cut, unit, memory = best.certificate.cut, plan.certificate.unit, sum(own.memory.values())
    return PlanAt(there, own.objective, bound, min(best.objective, own.objective), unit, memory, constraints.memory_limit, cut)


def _plan(annotated: Annotated, constraints: Constraints, objective: str, time_limit: float | None) -> ShardingPlan:
    formulation = formulate(annotated, constraints, objective)
    session = solved(annotated, constraints, formulation, allowance(time_limit))
    return decide(annotated, constraints, formulation, session.solution)


def _checked(sizes: Mapping[str, int], dims: Mapping[str, DynamicDim]) -> dict[str, int]:
    for name, size in sizes.items():
        if name not in dims:
            what = f"the plan has no dynamic dim {name!r}{closest(name, list(dims))}"
            raise OptionError(what, remedy=f"its dynamic dims are {', '.join(dims)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(f"{name} cannot be {size!r}", remedy="give a number of elements, at least 1")
        dims[name].check(size)
    return dict(sizes)
