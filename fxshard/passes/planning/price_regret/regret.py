"""The regret of a plan under wrong prices: the same graph, specs and constraints, priced and solved again for each draw.

Only prices change: graph, specs, calls, the work of each operator and the bytes of each step are those of the plan, and each solve starts
from the plan's choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxshard.errors import OptionError
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh
from fxshard.mesh.price_draws import Errors, drawn, errors_of
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.planning.choose import allowance, solved
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.planning.price_regret.repriced import objective_at
from fxshard.plans.price_regret import PriceRegret
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.solver import Budget

DRAW_WORK = 3e8
"""Table entries that the solve of a draw may read, about a second: from a good plan most searches end at once, and the rest close gaps
that are far smaller than what wrong prices change."""


def regret(
    plan: ShardingPlan,
    annotated: Annotated,
    constraints: Constraints,
    time_limit: float | None,
    error: Errors,
    draws: int,
    start: Sequence[int] = (),
) -> PriceRegret:
    """As ``ShardingPlan.regret``; ``start``: the choices of the plan's own solve, from which the others begin."""
    if type(draws) is not int or draws < 1:
        raise OptionError(f"cannot draw {draws!r} times", where="regret", remedy="give a whole number of draws, 1 or more")
    errors = errors_of(error, annotated.mesh.hardware)
    if plan.certificate.unit != "microseconds":
        raise OptionError("the plan minimises bytes, which have no price", where="regret", remedy="plan with objective='time'")
    losses, bounds, cut = [], [], 0
    for seed in range(draws):
        there = _priced(annotated, drawn(annotated.mesh.hardware, errors, seed))
        cost = objective_at(plan, annotated, there, constraints.optimizer)
        formulation = formulate(there, constraints, "time")
        best = solved(there, constraints, _from_plan(formulation, start), _budget(time_limit, constraints)).solution
        losses.append(max(0.0, cost / best.objective - 1))
        bounds.append(max(0.0, cost / best.lower_bound - 1) if best.lower_bound > 0 else 0.0)
        cut += best.cut
    return PriceRegret(errors, tuple(sorted(losses)), tuple(sorted(bounds)), cut)


def _from_plan(formulation: Formulation, start: Sequence[int]) -> Formulation:
    """The problem with a start at the plan's choices, if they are of this problem: a plan that happens to keep its memory limit was found
    by a problem without one."""
    costs = formulation.problem.node_costs
    same = len(start) == len(costs) and all(state < len(one) for state, one in zip(start, costs, strict=True))
    return replace(formulation, start=tuple(start)) if same else formulation


def _budget(time_limit: float | None, constraints: Constraints) -> Budget:
    """The work of one draw: that of a plan under a memory limit or within the user's seconds, else a part of it. A search that ends early
    leaves a bound, which the answer says."""
    budget = allowance(time_limit)
    return budget if time_limit is not None or constraints.memory_limit is not None else budget.part(DRAW_WORK)


def _priced(annotated: Annotated, hardware: Hardware) -> Annotated:
    """The same graph, specs and calls on other hardware."""
    mesh = Mesh(dict(zip(annotated.mesh.axis_names, annotated.mesh.shape, strict=True)), hardware)
    samples = tuple((weight, _priced(one, hardware)) for weight, one in annotated.samples)
    largest = None if annotated.largest is None else _priced(annotated.largest, hardware)
    return replace(annotated, mesh=mesh, samples=samples, largest=largest)
