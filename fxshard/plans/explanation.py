"""The answer of ``plan.explain``: a value's layout, its readers, and the cost of other layouts for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxshard.layout.layouts import Layout
from fxshard.plans.comparison import Comparison, signed
from fxshard.plans.plan_data import PlanData
from fxshard.text_table import fitted, in_short
from fxshard.views.words import cost_text, time_text

BETTER = 1e-6
"""Relative difference above which a layout counts as cheaper than the plan."""


@dataclass(frozen=True)
class Reading:
    """A reader of the value: its layout, the cost of redistributing to it (paid once for all readers of that layout), source line."""

    node: str
    what: str
    layout: Layout
    cost: float
    line: str


@dataclass(frozen=True)
class Choice:
    """A layout that the value might have.

    ``total``: the objective of the cheapest plan with it, proven to be at least ``lower_bound``; None if there is no such plan, and then
    ``reason`` says why. ``plan``: that plan; ``where``: how it differs from the explained plan.
    """

    layout: str
    total: float | None
    lower_bound: float | None
    chosen: bool = False
    cut: bool = False
    reason: str = ""
    plan: PlanData | None = field(default=None, repr=False)
    where: Comparison | None = field(default=None, repr=False)

    @property
    def gap(self) -> float | None:
        """(total - lower_bound) / total."""
        if self.total is None or self.lower_bound is None:
            return None
        return (self.total - self.lower_bound) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Explanation:
    """``choices``: the layouts that were tried, the cheapest first, impossible ones last. Costs are in ``unit``."""

    name: str
    node: str
    op: str
    line: str
    layout: Layout
    compute: float
    total: float
    unit: str
    readings: tuple[Reading, ...]
    choices: tuple[Choice, ...]

    def difference(self, choice: Choice) -> float | None:
        """How much a choice costs above the plan."""
        return None if choice.total is None else choice.total - self.total

    def __str__(self) -> str:
        own = f"{self.name} ({self.op})" if self.name == self.node else f"{self.name} ({self.op}, node {self.node})"
        head = f"{own}: {self.layout}, in a plan of {cost_text(self.total, self.unit)}"
        if self.compute:
            head += f"; computing it takes {time_text(self.compute)}"
        parts = [f"{head}\n{in_short(self.line)}" if self.line else head, self._readers(), self._choices(), self._better()]
        if len(self.choices) == 1 and self.choices[0].where is not None and not self.choices[0].chosen:
            parts += self.choices[0].where.tables(self._near(self.choices[0]))
        return "\n\n".join(part for part in parts if part)

    def _readers(self) -> str:
        rows = [
            (r.node, r.what, str(r.layout), cost_text(r.cost, self.unit) if r.layout != self.layout else "as it is", r.line)
            for r in self.readings
        ]
        return fitted(rows, ("read by", "which is", "as", "redistribution", "line"), same=False) if rows else "read by no node"

    def _choices(self) -> str:
        rows = []
        for choice in self.choices:
            more = self.difference(choice)
            if choice.total is None or more is None or choice.gap is None:
                rows.append((choice.layout, "-", "-", "-", choice.reason))
                continue
            proof_text = "cut" if choice.cut and choice.gap > 1e-6 else ""
            where = "the plan's own" if choice.chosen else self._where(choice)
            total, more_text = cost_text(choice.total, self.unit), signed(more, self.unit)
            rows.append((choice.layout, total, more_text, f"{choice.gap:.3%} {proof_text}".strip(), where))
        return fitted(rows, ("layout", "total", "difference", "gap", "where"), same=False)

    def _where(self, choice: Choice) -> str:
        if choice.where is None:
            return ""
        return choice.where.brief(self._near(choice)) or "other layouts that cost the same"

    def _near(self, choice: Choice) -> set[str]:
        """Names of the value, its gradient and its readers."""
        ends = choice.plan.outputs if choice.plan is not None else ()
        return {self.name, self.node, *(r.node for r in self.readings), *(end.node for end in ends if end.name == self.name)}

    def _better(self) -> str:
        """If the plan's search was cut short, the search for an answer may find a better plan."""
        totals = {k: c.total for k, c in enumerate(self.choices) if c.total is not None and c.total < self.total * (1 - BETTER)}
        if not totals:
            return ""
        best = min(totals, key=totals.__getitem__)
        least = cost_text(totals[best], self.unit)
        return (
            f"{self.choices[best].layout} costs less than this plan, whose search was cut by its time or work limit:\n"
            f"a longer time_limit can find a plan of {least} or less; choices[{best}].plan of this answer is one."
        )
