"""A plan as text: one screen, and the parts of it that others say too."""

from __future__ import annotations

from fxshard.layout.layouts import Layout
from fxshard.plans.plan_data import AGAIN, PlanData
from fxshard.plans.plan_json import plan_fields
from fxshard.views.plan_view import PlanView
from fxshard.views.screen import screen
from fxshard.views.tables import collectives_table, nodes_table


def view_of(plan: PlanData) -> PlanView:
    """What the plan's file says."""
    return PlanView(plan_fields(plan))


def plan_text(plan: PlanData) -> str:
    """The text of ``print(plan)``; ``fxshard.inspect.nodes_table`` and ``collectives_table`` show everything in full."""
    return screen(view_of(plan))


def whole_text(plan: PlanData) -> str:
    """The screen, then every node and every collective: for files that people search."""
    view = view_of(plan)
    return f"{screen(view)}\n\n{nodes_table(view)}\n\n{collectives_table(view)}"


def earlier_redistribution(plan: PlanData) -> dict[int, int]:
    """Index of a redistribution -> index of an earlier one of the same value to the same layout; a second run gives the same value."""
    first: dict[tuple[str, Layout], int] = {}
    keys = [(entry.value.removesuffix(AGAIN), entry.target) for entry in plan.redistributions]
    return {k: first[key] for k, key in enumerate(keys) if first.setdefault(key, k) != k}
