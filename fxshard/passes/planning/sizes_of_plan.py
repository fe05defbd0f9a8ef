"""Evaluates a plan with dynamic dims at other sizes: its cost and memory there, and the cost of the best plan there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fxshard.errors import ConstraintError, OptionError, PlanError, SizesError, closest
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import Annotated, at_sizes, first_illegal, specs_for_remainders
from fxshard.passes.planning.choose import allowance, decide, solved
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.price_regret.repriced import memory_at, objective_at
from fxshard.plans.plan_at import PlanAt
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.shapes import DynamicDim, GraphFamily, dynamic_dims, first_broken, sizes_named


def plan_at(
    plan: ShardingPlan,
    annotated: Annotated,
    constraints: Constraints,
    objective: str,
    time_limit: float | None,
    sizes: Mapping[str, int],
) -> PlanAt:
    """Evaluates ``plan`` at ``sizes``, by name; dims not named keep their example's size.

    Raises OptionError for an unknown name or an impossible size, SizesError where the plan is not legal at these sizes, PlanError if the
    proof contradicts the plan's cost.
    """
    family = _family(annotated)
    check_sizes(sizes, [dim for dim in family.dims if dim.name not in family.derived])
    there = family.with_derived({**family.example, **sizes})
    guard = first_broken(family.guards, there)
    if guard is not None:
        raise SizesError(f"the plan does not serve {sizes_named(there)}: the model takes for granted that {guard}", remedy=ANOTHER)
    other = at_sizes(annotated.graph, annotated.mesh, there)
    if first_illegal(plan, other.specs) is not None:
        specs = specs_for_remainders(annotated.graph, annotated.mesh, there)
        _check_among(plan, specs, there)
        other = replace(other, specs=specs)
    cost = objective_at(plan, annotated, replace(other, specs=annotated.specs), constraints.optimizer)
    try:
        best = best_plan(other, replace(constraints, memory_limit=None), objective, time_limit)
    except ConstraintError as error:  # such as a result of one element that must be sharded
        what = f"there is no plan for {sizes_named(there)} to compare with: {error.what}"
        raise SizesError(what, where=error.where, remedy=f"ask at larger sizes; {ANOTHER}") from error
    memory = memory_at(plan, annotated.graph, there, constraints.optimizer)
    bound, unit = _checked_bound(best.lower_bound, cost, there), plan.certificate.unit
    return PlanAt(there, cost, bound, min(best.objective, cost), unit, memory, constraints.memory_limit, best.certificate.cut)


ROUNDING = 1e-9
"""The fraction by which a bound may exceed the cost of the same plan, because the two add up the same terms in different orders."""


def _checked_bound(bound: float, cost: float, sizes: Mapping[str, int]) -> float:
    """The bound, not above the cost; raises PlanError, for a fault of fxshard, if it is above it by more than rounding."""
    if bound > cost * (1 + ROUNDING):
        what = f"at {sizes_named(sizes)} the plan costs {cost:,.9g}, less than {bound:,.9g}, which was proven to be the least: one is wrong"
        raise PlanError(what, remedy="please report it")
    return min(bound, cost)


def _family(annotated: Annotated) -> GraphFamily:
    family = annotated.graph.family
    if family is None:
        raise _no_dims()
    return family


def _no_dims() -> OptionError:
    remedy = "plan with dynamic_shapes={'args[0]': {0: 'batch'}}, on the command line --dynamic args[0]:0=batch"
    return OptionError("the plan has no dynamic dims", remedy=remedy)


ANOTHER = "parallelize and fxshard.export make another plan for such sizes; to see its cost, call fxshard.plan with an example of them"


def check_legal(plan: ShardingPlan, graph: PlanningGraph, sizes: Mapping[str, int]) -> None:
    """Raises SizesError if some node's spec in the plan cannot be lowered at these ``sizes``, by name; ``graph`` has dynamic dims."""
    _check_among(plan, specs_for_remainders(graph, plan.mesh, sizes), sizes)


def _check_among(plan: ShardingPlan, specs: Mapping[str, tuple[OpSpec, ...]], sizes: Mapping[str, int]) -> None:
    node = first_illegal(plan, specs)
    if node is not None:
        what = f"the plan is not legal at {sizes_named(sizes)}: {node} cannot run as {plan.specs[node]}"
        raise SizesError(what, where=plan.lines.get(node, f"node {node}"), remedy=ANOTHER)


def best_plan(annotated: Annotated, constraints: Constraints, objective: str, time_limit: float | None) -> ShardingPlan:
    """The plan that the solver finds for an annotated graph."""
    formulation = formulate(annotated, constraints, objective)
    session = solved(annotated, constraints, formulation, allowance(time_limit))
    return decide(annotated, constraints, formulation, session.solution)


def check_sizes(sizes: Mapping[str, int], dims: Sequence[DynamicDim]) -> None:
    """Raises OptionError if one of ``sizes``, by name, names none of a plan's dynamic ``dims`` or is a size that its dim cannot have."""
    known = {dim.name: dim for dim in dims}
    if not known:
        raise _no_dims()
    for name, size in sizes.items():
        if name not in known:
            what = f"the plan has no dynamic dim {name!r}{closest(name, known)}"
            raise OptionError(what, remedy=f"its dynamic dims are {', '.join(known)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise OptionError(f"{name} cannot be {size!r}", remedy="give a number of elements, at least 1")
        known[name].check(size)


def check_asked(
    sizes: Sequence[Mapping[str, int]], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> None:
    """Raises OptionError, before planning, if ``plan.at`` would refuse every one of ``sizes``."""
    dims = dynamic_dims(model, args, kwargs, dynamic_shapes) if sizes else ()
    refused = []
    for one in sizes:
        try:
            check_sizes(one, dims)
        except OptionError as error:
            refused.append(error)
    if refused and len(refused) == len(sizes):
        raise refused[0]


MOST = 2**31
"""The largest size that is tried."""


def holds_up_to(plan: ShardingPlan, annotated: Annotated, constraints: Constraints) -> dict[str, int | None]:
    """The largest size of each dim without a ``max`` at which ``plan`` keeps its memory limit; None if it always does.

    Sizes that violate the assumptions of the trace count as too large. One dim varies at a time, the others have ``plan.memory_sizes``; a
    dim that must divide evenly varies in multiples of the mesh's size. Raises OptionError without a memory limit or dynamic dims.
    """
    family, limit = _family(annotated), constraints.memory_limit
    if limit is None:
        raise OptionError("the plan has no memory limit to keep", remedy="plan with memory_limit='80GB'")
    found: dict[str, int | None] = {}
    for dim in family.dims:
        if dim.most is None and dim.name not in family.derived:
            unit = 1 if dim.uneven else annotated.mesh.size
            start = plan.memory_sizes[dim.name]

            def holds(size: int, name: str = dim.name) -> bool:
                there = family.with_derived({**plan.memory_sizes, name: size})
                return (
                    first_broken(family.guards, there) is None and memory_at(plan, annotated.graph, there, constraints.optimizer) <= limit
                )

            last = _last(lambda k, start=start, unit=unit: holds(max(start, k * unit)), start // unit)  # type: ignore[misc]
            found[dim.name] = None if last is None else max(start, last * unit)
    return found


def _last(holds: Callable[[int], bool], start: int) -> int | None:
    """The last number for which ``holds``, by bisection: it must hold from ``start`` up to that number; None if it holds up to MOST."""
    low, high = start, 2 * max(start, 1)
    while holds(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
