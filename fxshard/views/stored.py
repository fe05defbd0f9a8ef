"""A plan's file as a view, and the version of its format."""

from __future__ import annotations

import math

from fxshard.files import Field, parse_json
from fxshard.views.plan_view import PlanView

FORMAT, VERSION = "fxshard-plan", 5
ROUNDING = 1e-9
BY_HAND = (
    f'make the plan again; one written by hand needs "format": "{FORMAT}", "version": {VERSION}, "partial": true, '
    '"mesh": {"axes": [["tp", 2]]} and "nodes": [{"name": ..., "outputs": [...]}]'
)
UNREADABLE = f"make the plan again, or read it with the fxshard that wrote it; this one reads version {VERSION}"

DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ArithmeticError)
"""What views raise on fields that no plan has. ``plans/plan_json.py`` then says what is wrong, and where."""


def check_plan(root: Field) -> None:
    """Raises FileError unless the file is a plan of this version."""
    root.check_version(FORMAT, VERSION, "plan", BY_HAND, UNREADABLE)


def read_view(text: bytes, where: str) -> PlanView:
    """The view of a plan's text; raises FileError for another format or version, and an error in ``DAMAGE`` for fields that contradict
    each other."""
    root = parse_json(text, where, BY_HAND)
    check_plan(root)
    view = PlanView(root.value)
    if not view.partial:
        parts = [node["compute"] for node in view.nodes.values()]
        parts += [entry["cost"] for entry in (*view.redistributions, *view.fields.get("offloaded", ()))]
        total = math.fsum(parts)
        sent = sum(step["kind"] not in LOCAL for entry in view.redistributions for step in entry["steps"])
        own = sum(len(node.get("collectives", ())) for node in view.nodes.values())
        if not math.isclose(total, view.objective, rel_tol=ROUNDING) or len(view.collectives) != sent + own:
            raise ValueError("the objective or the list of collectives does not fit the nodes and redistributions")
    return view


LOCAL = ("slice", "to_partial")
"""Steps of redistributions that send nothing."""
