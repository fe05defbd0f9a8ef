"""The cost of a plan for dynamic dims at other sizes than its example's, compared with the best plan there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxshard.byte_sizes import size_text


@dataclass(frozen=True)
class PlanAt:
    """A plan at given ``sizes``, by name.

    ``objective``: its cost there, in ``unit``; ``lower_bound``: a bound on the cost of every plan there; ``best``: the best cost found.
    ``memory``: peak bytes per device; ``memory_limit``: the plan's. ``cut``: whether the search ended early.
    """

    sizes: Mapping[str, int]
    objective: float
    lower_bound: float
    best: float
    unit: str
    memory: int
    memory_limit: int | None = None
    cut: bool = False

    @property
    def regret(self) -> float:
        """The plan's cost divided by the lower bound, minus 1: 0 if the plan is proven to be the best there."""
        return self.objective / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @property
    def within_limit(self) -> bool:
        """Whether the plan keeps its memory limit there."""
        return self.memory_limit is None or self.memory <= self.memory_limit

    def __str__(self) -> str:
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        limit = "" if self.within_limit else f", more than memory_limit={size_text(self.memory_limit or 0)}"
        text = f"at {at}: {self.objective:,.6g} {self.unit}, no plan below {self.lower_bound:,.6g} (regret {self.regret:.2%})"
        return f"{text}; {size_text(self.memory)} per device{limit}"
