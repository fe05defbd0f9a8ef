"""The collectives that a program issues, each with the plan's collective that it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fxshard.byte_sizes import size_text
from fxshard.text_table import fitted, number_runs
from fxshard.views.plan_view import Collective, Fields, PlanView
from fxshard.views.reasons import reason
from fxshard.views.tables import WIDE, where_text
from fxshard.views.words import shape_text


def issued_table(view: PlanView, program: Fields, width: int = WIDE) -> str:
    """One line per collective: bytes that each rank sends, the buffer, the node that issues it, and what it is for: the numbers of the
    plan's collectives that it serves (several if they were merged), the most frequent reason first."""
    if not program["collectives"]:
        return "no collectives"
    planned = {(c.entry, c.step): number for number, c in enumerate(view.collectives)}
    rows = [_issued(view, planned, c) for c in program["collectives"]]
    return fitted(rows, ("serves", "collective", "axis", "bytes", "buffer", "dtype", "node", "where", "reason"), width=width)


def _issued(view: PlanView, planned: Mapping[tuple[int, int], int], c: Fields) -> tuple[Any, ...]:
    numbers = [planned[entry, step] for entry, step in c["serves"] if (entry, step) in planned]
    served = [view.collectives[number] for number in numbers]
    more = f" and {len(served) - 1} more" if served[1:] else ""
    place = where_text(view, served[0]) + more if served else ""
    sizes = size_text(c["bytes"]), shape_text(c["shape"]), c["dtype"].removeprefix("torch.")
    return ",".join(number_runs(sorted(numbers))), c["kind"], c["axis"], *sizes, c["node"], place, _reasons(view, served)


def _reasons(view: PlanView, served: Sequence[Collective]) -> str:
    found = Counter(reason(view, one) for one in served).most_common()
    return found[0][0] if len(found) == 1 else "; ".join(f"{count}: {said}" for said, count in found)
