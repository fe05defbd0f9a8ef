"""The regret of a plan under wrong prices: the same graph, specs and constraints, priced and solved again for each draw."""

from __future__ import annotations

from dataclasses import replace

from fxshard.errors import OptionError
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh
from fxshard.mesh.price_draws import drawn
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.price_regret.repriced import objective_at
from fxshard.passes.planning.sizes_of_plan import best_plan
from fxshard.plans.price_regret import PriceRegret
from fxshard.plans.sharding_plan import ShardingPlan


def regret(
    plan: ShardingPlan, annotated: Annotated, constraints: Constraints, time_limit: float | None, error: float, draws: int
) -> PriceRegret:
    """As ``ShardingPlan.regret``."""
    if not 0 < error < 10 or draws < 1:
        what = f"cannot draw {draws} times within an error of {error}"
        raise OptionError(what, where="regret", remedy="give an error such as 0.3, and 1 draw or more")
    if plan.certificate.unit != "microseconds":
        raise OptionError("the plan minimises bytes, which have no price", where="regret", remedy="plan with objective='time'")
    losses, bounds, cut = [], [], 0
    for seed in range(draws):
        there = _priced(annotated, drawn(annotated.mesh.hardware, error, seed))
        cost = objective_at(plan, annotated, there, constraints.optimizer)
        best = best_plan(there, constraints, "time", time_limit)
        losses.append(max(0.0, cost / best.objective - 1))
        bounds.append(max(0.0, cost / best.lower_bound - 1) if best.lower_bound > 0 else 0.0)
        cut += best.certificate.cut
    return PriceRegret(error, tuple(sorted(losses)), tuple(sorted(bounds)), cut)


def _priced(annotated: Annotated, hardware: Hardware) -> Annotated:
    """The same graph, specs and calls on other hardware."""
    mesh = Mesh(dict(zip(annotated.mesh.axis_names, annotated.mesh.shape, strict=True)), hardware)
    samples = tuple((weight, _priced(one, hardware)) for weight, one in annotated.samples)
    largest = None if annotated.largest is None else _priced(annotated.largest, hardware)
    return replace(annotated, mesh=mesh, samples=samples, largest=largest)
