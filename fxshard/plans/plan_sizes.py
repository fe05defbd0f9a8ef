"""The sizes of dynamic dims in a plan, as JSON: the sizes that the objective is for, and those that its memory is for."""

from __future__ import annotations

import math
from typing import Any

from fxshard.files import Field, Readers
from fxshard.plans.plan_data import PlanData
from fxshard.shapes import WeightedSizes

FIX = "correct this field, or make the plan again"
WHOLE = 1e-9
"""Relative tolerance for the sum of the weights, which must be 1."""


def write_sizes(plan: PlanData) -> dict[str, Any]:
    """The fields of a plan's file about sizes; none if all are static."""
    found: dict[str, Any] = {}
    if plan.memory_sizes:
        found["memory_sizes"] = {name: int(size) for name, size in plan.memory_sizes.items()}
    if plan.example_sizes:
        found["example_sizes"] = [
            {"sizes": {name: int(size) for name, size in one.sizes}, "weight": float(one.weight)} for one in plan.example_sizes
        ]
    return found


def read_sizes(field: Field) -> dict[str, int]:
    """Sizes by name; raises FileError for a size below 1."""
    return {name: one.whole(1) for name, one in field.entries().items()}


def read_example_sizes(field: Field) -> tuple[WeightedSizes, ...]:
    """Sizes with weights; raises FileError unless the weights add up to 1."""
    found = field.tuple_of(_read_weighted)
    if found and not math.isclose(math.fsum(one.weight for one in found), 1.0, rel_tol=WHOLE):
        raise field.fail("the weights do not add up to 1", FIX)
    return found


def _read_weighted(field: Field) -> WeightedSizes:
    readers: Readers = {"sizes": lambda f: tuple(read_sizes(f).items()), "weight": Field.figure}
    return WeightedSizes(**field.record(readers))
