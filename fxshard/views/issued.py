"""The collectives that a program issues, each with the plan's collective that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxshard.byte_sizes import size_text
from fxshard.text_table import fitted
from fxshard.views.plan_view import Collective, Fields, PlanView
from fxshard.views.reasons import reason
from fxshard.views.tables import where_text
from fxshard.views.words import shape_text


def issued_table(view: PlanView, program: Fields) -> str:
    """One line per collective: bytes that each rank sends, the buffer, the node that issues it, and what it is for."""
    if not program["collectives"]:
        return "no collectives"
    planned = {(c.entry, c.step): c for c in view.collectives}
    rows = [_issued(view, planned, c) for c in program["collectives"]]
    return fitted(rows, ("collective", "axis", "bytes", "buffer", "dtype", "node", "where", "reason"), width=160)


def _issued(view: PlanView, planned: Mapping[tuple[int, int], Collective], c: Fields) -> tuple[Any, ...]:
    served = [planned[entry, step] for entry, step in c["serves"] if (entry, step) in planned]
    more = f" and {len(served) - 1} more" if served[1:] else ""
    told = (where_text(view, served[0]) + more, reason(view, served[0])) if served else ("", "")
    return c["kind"], c["axis"], size_text(c["bytes"]), shape_text(c["shape"]), c["dtype"].removeprefix("torch."), c["node"], *told
