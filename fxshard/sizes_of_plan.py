"""Asks a plan for dynamic dims what it costs and holds at other sizes, and what the best plan costs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fxshard.errors import OptionError, PlanError, SizesError, closest
from fxshard.passes.annotate import Annotated, at_sizes
from fxshard.passes.choose import allowance, decide, solved
from fxshard.passes.constrain import Constraints
from fxshard.passes.formulate import formulate, result_layouts
from fxshard.passes.recompute import expanded
from fxshard.passes.repriced import memory_at, objective_at
from fxshard.passes.verify import verify_specs
from fxshard.plan_at import PlanAt
from fxshard.planning_graph import operands
from fxshard.shapes import DynamicDim, GraphFamily, broken, sizes_named
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
    family = _family(annotated)
    free = {dim.name: dim for dim in family.dims if dim.name not in family.derived}
    there = family.with_derived({**family.example, **_checked(sizes, free)})
    guard = broken(family.guards, there)
    if guard is not None:
        raise SizesError(f"the plan does not serve {dict(there)}: the model takes for granted that {guard}", remedy="plan for these sizes")
    other = at_sizes(annotated.graph, annotated.mesh, there)
    _check_legal(plan, other)
    cost = objective_at(plan, annotated, replace(other, specs=annotated.specs))
    best = _best(other, replace(constraints, memory_limit=None), objective, time_limit)
    memory = memory_at(plan, annotated.graph, there, constraints.optimizer)
    bound, certificate = min(best.lower_bound, cost), best.certificate
    return PlanAt(there, cost, bound, min(best.objective, cost), plan.certificate.unit, memory, constraints.memory_limit, certificate.cut)


def _family(annotated: Annotated) -> GraphFamily:
    family = annotated.graph.family
    if family is None:
        raise OptionError("the plan has no dynamic dims", remedy="plan with dynamic_shapes={'args[0]': {0: 'batch'}}")
    return family


def _check_legal(plan: ShardingPlan, other: Annotated) -> None:
    """Raises SizesError where a node cannot run as planned at the sizes of ``other``, or a result cannot lie so."""
    where = sizes_named(other.sizes)
    try:
        verify_specs(expanded(other, plan.recomputed), plan)
    except PlanError as error:
        raise SizesError(f"the plan is not legal at {where}: {error.what}", where=error.where, remedy="plan for these sizes") from error
    returned = operands(other.graph.module.graph.output_node())
    for end, node, layout in zip(plan.outputs, returned, plan.specs["output"].inputs, strict=True):
        if end.kind == "output" and layout not in result_layouts(node, other.mesh):
            what = f"the plan is not legal at {where}: {end.name} cannot be returned in {layout}"
            raise SizesError(what, remedy="plan for these sizes")


def _best(annotated: Annotated, constraints: Constraints, objective: str, time_limit: float | None) -> ShardingPlan:
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


MOST = 2**31
"""Sizes beyond this are not asked about."""


def holds_up_to(plan: ShardingPlan, annotated: Annotated, constraints: Constraints) -> dict[str, int | None]:
    """How far ``plan`` keeps to its memory limit: the largest size of each dim without a ``max``, None where any will do.

    No further than what the trace took for granted holds. One dim at a time, the others as in ``plan.memory_sizes``; a dim that is cut
    evenly in multiples of the mesh's size. Raises OptionError for a plan without a memory limit or without dynamic dims.
    """
    family, limit = _family(annotated), constraints.memory_limit
    if limit is None:
        raise OptionError("the plan has no memory limit that could hold", remedy="plan with memory_limit='80GB'")
    found: dict[str, int | None] = {}
    for dim in family.dims:
        if dim.most is None and dim.name not in family.derived:
            unit = 1 if dim.uneven else annotated.mesh.size
            start = plan.memory_sizes[dim.name]

            def holds(size: int, name: str = dim.name) -> bool:
                there = family.with_derived({**plan.memory_sizes, name: size})
                return broken(family.guards, there) is None and memory_at(plan, annotated.graph, there, constraints.optimizer) <= limit

            last = _last(lambda k, start=start, unit=unit: holds(max(start, k * unit)), start // unit)  # type: ignore[misc]
            found[dim.name] = None if last is None else max(start, last * unit)
    return found


def _last(holds: Callable[[int], bool], start: int) -> int | None:
    """The last number that ``holds``, as it does from ``start`` up to there; None where it does everywhere."""
    low, high = start, 2 * max(start, 1)
    while holds(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
