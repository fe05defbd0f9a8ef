"""Several plans of one model side by side, and why the first is better, in a sentence each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxshard.byte_sizes import size_text
from fxshard.text_table import fitted, labelled, listed
from fxshard.views.plan_view import Collective, PlanView
from fxshard.views.reasons import where
from fxshard.views.words import alike, cost_text

EQUAL = 1e-6
"""Objectives count as equal up to this relative difference: sums of many floats in different orders."""


@dataclass(frozen=True)
class Compared:
    """A plan by its name; ``view`` is None if there is none, and ``failed`` says why."""

    name: str
    view: PlanView | None
    failed: str = ""


def compared_text(plans: Sequence[Compared]) -> str:
    """A table of all plans, and a sentence on each but the first."""
    rows = [_row(one) for one in plans]
    table = fitted(rows, ("plan", "objective", "compute", "exposed communication", "sent by a rank", "memory"), same=False)
    told = labelled([(one.name, sentence(plans[0], one)) for one in plans[1:]])
    return f"{table}\n\n{told}" if told else table


def _row(one: Compared) -> tuple[str, ...]:
    view = one.view
    if view is None:
        return one.name, "no plan", "", "", "", ""
    exposed = math.fsum(view.exposed.values())
    sent, memory = size_text(sum(c.bytes for c in view.collectives)), size_text(sum(view.memory.values()))
    shown = "" if view.unit == "bytes" else cost_text(view.compute, view.unit)
    return one.name, cost_text(view.objective, view.unit), shown, cost_text(exposed, view.unit), sent, memory


def sentence(best: Compared, other: Compared) -> str:
    """What the other plan costs more than the best, and where."""
    if other.view is None:
        return f"no plan: {other.failed}"
    if best.view is None:
        return f"{best.name} has no plan to compare with"
    one, two = best.view, other.view
    more = two.objective - one.objective
    if abs(more) <= EQUAL * max(abs(one.objective), abs(two.objective)):
        return f"costs the same as {best.name}{_memory(one, two)}"
    share = f" ({abs(more) / one.objective:.1%})" if one.objective else ""
    head = f"costs {cost_text(abs(more), two.unit)}{share} {'more' if more > 0 else 'less'}"
    return f"{head}: {_parts(one, two)}{_most(one, two)}{_memory(one, two)}"


def _parts(one: PlanView, two: PlanView) -> str:
    """The differences in compute and in communication by axis, the largest first."""
    changes = {f"communication on {axis}": two.exposed[axis] - one.exposed[axis] for axis in one.axes}
    changes |= {} if one.unit == "bytes" else {"compute": two.compute - one.compute}
    told = [(what, by) for what, by in changes.items() if abs(by) > EQUAL * max(one.objective, two.objective)]
    texts = [f"{cost_text(abs(by), one.unit)} {'more' if by > 0 else 'less'} {what}" for what, by in sorted(told, key=lambda t: -abs(t[1]))]
    return ", ".join(texts)


def _most(one: PlanView, two: PlanView) -> str:
    """The kind of collective on an axis that adds most, and the modules where."""
    kinds = _by_kind(two)
    added = {key: _cost(found) - _cost(_by_kind(one).get(key, [])) for key, found in kinds.items()}
    key = max(added, key=added.__getitem__, default=None)
    if key is None or added[key] <= EQUAL * two.objective:
        return ""
    found = sorted(kinds[key], key=lambda c: -c.cost)[: max(len(kinds[key]) // 2, 1)]
    modules = listed(alike(dict.fromkeys(where(two, c).module or "the model itself" for c in found)), 60)
    before = len(_by_kind(one).get(key, []))
    return f"; most by {key[0]} on {key[1]} ({len(kinds[key])} instead of {before or 'none'}): {modules}"


def _by_kind(view: PlanView) -> dict[tuple[str, str], list[Collective]]:
    found: dict[tuple[str, str], list[Collective]] = {}
    for c in view.collectives:
        found.setdefault((c.kind, c.axis), []).append(c)
    return found


def _cost(found: Sequence[Collective]) -> float:
    return math.fsum(c.cost for c in found)


def _memory(one: PlanView, two: PlanView) -> str:
    more = sum(two.memory.values()) - sum(one.memory.values())
    if abs(more) <= 0.01 * max(sum(one.memory.values()), 1):
        return ""
    return f"; {size_text(abs(more))} {'more' if more > 0 else 'less'} memory"


def plain_compared(plans: Sequence[Compared]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [
        {"plan": one.name, "why": sentence(plans[0], one) if k else "", **({} if one.view is None else _figures(one.view))}
        for k, one in enumerate(plans)
    ]


def _figures(view: PlanView) -> dict[str, Any]:
    times = {"objective": view.objective, "lower_bound": view.lower_bound, "compute": view.compute, "exposed": view.exposed}
    return {"unit": view.unit, **times, "bytes": sum(c.bytes for c in view.collectives), "memory": dict(sorted(view.memory.items()))}
