"""ShardingPlan: a plan (plan_data.py) with its JSON file, its text and its answers to questions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fxshard.errors import PlanError
from fxshard.plans.plan_data import PlanData

if TYPE_CHECKING:
    from fxshard.memory_profile import MemoryProfile
    from fxshard.plans.explanation import Explanation
    from fxshard.plans.plan_at import PlanAt
    from fxshard.plans.price_regret import PriceRegret
    from fxshard.plans.reasons import CollectiveReason


class Origin(Protocol):
    """Answers questions that need more than the plan's data."""

    @property
    def cached(self) -> Path | None:
        """The cache file that the plan was read from; None if it was made."""

    def explain(self, plan: ShardingPlan, name: str, layout: Any = None) -> Explanation:
        """As ``ShardingPlan.explain``."""

    def memory_profile(self, plan: ShardingPlan) -> MemoryProfile:
        """As ``ShardingPlan.memory_profile``."""

    def at(self, plan: ShardingPlan, sizes: Mapping[str, int]) -> PlanAt:
        """As ``ShardingPlan.at``."""

    def regret(self, plan: ShardingPlan, error: float | str | Mapping[str, float], draws: int) -> PriceRegret:
        """As ``ShardingPlan.regret``."""

    def holds_up_to(self, plan: ShardingPlan) -> Mapping[str, int | None]:
        """As ``ShardingPlan.holds_up_to``."""

    def module_of(self, node: str) -> str | None:
        """The name of the module that returns exactly this value, if any; the outermost of several."""


_ORIGIN = "_origin"


@dataclass(frozen=True)
class ShardingPlan(PlanData):
    """A plan for one graph on one mesh; its fields are those of ``PlanData``."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON text without source lines, whose paths differ between machines; ranks compare it."""
        from fxshard.plans.plan_json import dumps

        return hashlib.sha256(dumps(self, sources=False).encode()).hexdigest()

    def why_collective(self, index: int) -> CollectiveReason:
        """Why ``collectives[index]`` runs: the producer's and readers' layouts, with source lines. Raises PlanError."""
        from fxshard.plans.reasons import why_collective

        return why_collective(self, index) if self.origin is None else why_collective(self, index, self.origin.module_of)

    def explain(self, name: str, layout: Any = None) -> Explanation:
        """The readers of a value, and the cost of other layouts for it, each found by solving again with it pinned.

        Args:
            name: the user's name of a parameter, buffer, input or output, a submodule (what it returns), or a node; for one of several
                results ``"attn[0]"``.
            layout: one layout to ask about, written as for pins (default: all legal ones).

        Raises:
            PlanError: no value or several values have that name; or the plan does not know its graph: only a plan that ``fxshard.plan``
                made in this process does, not a copy. LayoutError: an impossible layout.
        """
        return self._maker().explain(self, name, layout)

    def memory_profile(self) -> MemoryProfile:
        """A device's memory over time, tensor by tensor: ``memory`` is its peak by kind, and ``fxshard.inspect.memory_table`` shows it.
        Raises PlanError as ``explain``. For a lowered program, use ``fxshard.program_memory``."""
        return self._maker().memory_profile(self)

    def at(self, **sizes: int) -> PlanAt:
        """This plan at other sizes of its dynamic dims, by name (``plan.at(batch=4, seq=8192)``): its objective and memory there, and the
        proven bound of the best plan there, hence its regret.

        Raises OptionError for an unknown name or an impossible size, SizesError if the plan is not legal at these sizes, PlanError for a
        plan that was read from a file or copied.
        """
        return self._maker().at(self, sizes)

    def regret(self, error: float | str | Mapping[str, float] = 0.3, draws: int = 50) -> PriceRegret:
        """What this plan loses if prices are wrong: each is multiplied by a number between 1 / (1 + error) and 1 + error, ``draws`` times,
        and the problem is solved again under the same constraints. The draws are the same each time.

        ``error``: one for all prices; or ``"stated"``, the errors that the preset states; or one by family: ``{"between": 0.8}`` (the
        families: arithmetic, memory, inside, between, axes, collectives, all_to_all, launch, host).

        Raises OptionError for an ``error`` or ``draws`` out of range or a plan that minimises bytes, PlanError as ``explain``.
        """
        return self._maker().regret(self, error, draws)

    def holds_up_to(self) -> Mapping[str, int | None]:
        """For each dynamic dim without a ``max``, by name: the largest size at which the plan keeps its memory limit, with the other dims
        as in ``memory_sizes``; None if it keeps it at every size. Dims with a ``max`` are left out: the plan keeps its limit up to that.

        Raises OptionError for a plan without a limit or without dynamic dims, PlanError as ``at``.
        """
        return self._maker().holds_up_to(self)

    def _maker(self) -> Origin:
        if self.origin is None:
            what = "the plan does not know the graph that it is for: it was read from a file, copied, or not made by fxshard.plan"
            remedy = "plan again, plan = fxshard.plan(model, args, mesh, ...), and ask that plan; pins=plan there keeps these decisions"
            raise PlanError(what, where=f"plan on mesh {self.mesh}", remedy=remedy)
        return self.origin

    @property
    def origin(self) -> Origin | None:
        """What answers questions about the plan; set in the process that made it, and not part of its data or of copies."""
        return vars(self).get(_ORIGIN)

    def made_by(self, origin: Origin) -> ShardingPlan:
        """Sets ``origin``, so that this plan can answer questions; returns the plan."""
        vars(self)[_ORIGIN] = origin
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _ORIGIN}

    def to_json(self) -> str:
        from fxshard.plans.plan_json import dumps

        return dumps(self)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, atomically."""
        from fxshard.plans.plan_json import save

        save(self, path)

    @staticmethod
    def load(path: str | Path) -> ShardingPlan:
        """Reads a plan; raises FileError naming the file and the fault."""
        from fxshard.plans.plan_json import load

        return load(ShardingPlan, path)

    @staticmethod
    def from_json(text: str | bytes, where: str = "<plan>") -> ShardingPlan:
        """Reads a plan from text; raises FileError naming ``where`` and the fault."""
        from fxshard.plans.plan_json import loads

        return loads(ShardingPlan, text, where)

    def __str__(self) -> str:
        from fxshard.plans.plan_text import plan_text

        return plan_text(self)

    def _repr_html_(self) -> str:
        from fxshard.plans.plan_text import view_of
        from fxshard.views.notebook import plan_html

        return plan_html(view_of(self))
