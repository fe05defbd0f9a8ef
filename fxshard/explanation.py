"""What ``plan.explain`` answers: a value's layout, who reads it how, and what other layouts of it would cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from tabulate import tabulate

from fxshard.comparison import Comparison
from fxshard.layout import Layout
from fxshard.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Reading:
    """Someone who reads the value: in which layout, what bringing it there costs (once for all who read it so), the user's line."""

    node: str
    what: str
    layout: Layout
    cost: float
    line: str


@dataclass(frozen=True)
class Choice:
    """A layout that the value might have.

    ``total``: the cheapest plan's objective with it, proven to be at least ``lower_bound``; None where there is no such plan, which
    ``reason`` says. ``plan``: that plan; ``where``: how it differs from the plan that was asked.
    """

    layout: str
    total: float | None
    lower_bound: float | None
    chosen: bool = False
    cut: bool = False
    reason: str = ""
    plan: ShardingPlan | None = field(default=None, repr=False)
    where: Comparison | None = field(default=None, repr=False)

    @property
    def gap(self) -> float | None:
        """(total - lower_bound) / total."""
        if self.total is None or self.lower_bound is None:
            return None
        return (self.total - self.lower_bound) / self.total if self.total else 0.0


@dataclass(frozen=True)
class Explanation:
    """``choices``: those that were looked at, the cheapest first, impossible ones last. Costs are in ``unit``."""

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
        """What a choice costs more than the plan."""
        return None if choice.total is None else choice.total - self.total

    def __str__(self) -> str:
        own = f"{self.name}" if self.name == self.node else f"{self.name} (node {self.node})"
        head = f"{own}, {self.op}: {self.layout} in a plan of {self.total:,.6g} {self.unit}"
        if self.compute:
            head += f"; computing it takes {self.compute:,.4g}"
        parts = [f"{head}\n{self.line}" if self.line else head, self._readers(), self._choices()]
        if len(self.choices) == 1 and self.choices[0].where is not None and not self.choices[0].chosen:
            parts += self.choices[0].where.tables()
        return "\n\n".join(part for part in parts if part)

    def _readers(self) -> str:
        rows = [(r.node, r.what, str(r.layout), f"{r.cost:,.4g}" if r.layout != self.layout else "as it is", r.line) for r in self.readings]
        return (
            tabulate(rows, headers=("read by", "which is", "as", "bringing it", "line"), disable_numparse=True) if rows else "read by none"
        )

    def _choices(self) -> str:
        rows = []
        for choice in self.choices:
            more = self.difference(choice)
            if choice.total is None or more is None or choice.gap is None:
                rows.append((choice.layout, "-", "-", "-", choice.reason))
                continue
            proof = "cut" if choice.cut and choice.gap > 1e-6 else ""
            where = "the plan's own" if choice.chosen else choice.where.brief() if choice.where else ""
            rows.append((choice.layout, f"{choice.total:,.6g}", f"{more:+,.4g}", f"{choice.gap:.3%} {proof}".strip(), where))
        headers = ("layout", f"total {self.unit}", "difference", "gap", "where")
        return tabulate(rows, headers=headers, disable_numparse=True)
