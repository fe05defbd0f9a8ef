"""ShardingPlan: a plan (plan_data.py) with its JSON file, its text and its answers."""

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
    from fxshard.plans.reasons import CollectiveReason


class Origin(Protocol):
    """What answers questions that take more than the plan's data."""

    @property
    def cached(self) -> Path | None:
        """The file of the cache that the plan was read from, None where it was made."""

    def explain(self, plan: ShardingPlan, name: str, layout: Any = None) -> Explanation:
        """As ``ShardingPlan.explain``."""

    def memory_profile(self, plan: ShardingPlan) -> MemoryProfile:
        """As ``ShardingPlan.memory_profile``."""

    def at(self, plan: ShardingPlan, sizes: Mapping[str, int]) -> PlanAt:
        """As ``ShardingPlan.at``."""

    def holds_up_to(self, plan: ShardingPlan) -> Mapping[str, int | None]:
        """As ``ShardingPlan.holds_up_to``."""

    def module_of(self, node: str) -> str | None:
        """The name of the module that returns just this value, if any; of several the outermost."""


_ORIGIN = "_origin"


@dataclass(frozen=True)
class ShardingPlan(PlanData):
    """A plan for one graph on one mesh; its fields are those of ``PlanData``."""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON text without source lines, whose paths differ between machines: what ranks compare."""
        from fxshard.plans.plan_json import dumps

        return hashlib.sha256(dumps(self, sources=False).encode()).hexdigest()

    def why_collective(self, index: int) -> CollectiveReason:
        """Why ``collectives[index]`` runs: who gives the value and who reads it otherwise, with source lines. Raises PlanError."""
        from fxshard.plans.reasons import why_collective

        return why_collective(self, index) if self.origin is None else why_collective(self, index, self.origin.module_of)

    def explain(self, name: str, layout: Any = None) -> Explanation:
        """Who reads a value how, and what other layouts of it would cost, each by solving again with it pinned.

        Args:
            name: a parameter, buffer, input or output by the user's name, a submodule (what it returns), or a node; of several results
                one, ``"attn[0]"``.
            layout: one choice to ask about, written as for pins (default: all legal ones).

        Raises:
            PlanError: nothing has that name, or several values have; or the plan does not know what made it. A plan that ``fxshard.plan``
                made knows, in its process; one that was read, copied or changed does not. LayoutError: a layout that cannot be.
        """
        return self._maker().explain(self, name, layout)

    def memory_profile(self) -> MemoryProfile:
        """What a device holds over time as the plan counts it, tensor by tensor: ``memory`` is the peak of it by kind, and
        ``fxshard.inspect.memory_table`` shows it. Raises PlanError as ``explain``; ``fxshard.program_memory`` takes a lowered program."""
        return self._maker().memory_profile(self)

    def at(self, **sizes: int) -> PlanAt:
        """This plan at other sizes of its dynamic dims, by name (``plan.at(batch=4, seq=8192)``): its objective there, the proven bound of
        the best plan there, and so its regret; and the memory that it takes.

        Raises OptionError for a name or a size that cannot be, SizesError where the plan is not legal at these sizes, PlanError for a
        plan that was read from a file or copied.
        """
        return self._maker().at(self, sizes)

    def holds_up_to(self) -> Mapping[str, int | None]:
        """Up to which size the plan keeps to its memory limit, by name of each dynamic dim without a ``max``, the others as in
        ``memory_sizes``; None where it does at any size. Dims with a ``max`` are not named: the limit holds there.

        Raises OptionError for a plan without a limit or without dynamic dims, PlanError as ``at``.
        """
        return self._maker().holds_up_to(self)

    def _maker(self) -> Origin:
        if self.origin is None:
            what = (
                "the plan does not know the graph that it is for: it was read from a file, copied, or made by other means than fxshard.plan"
            )
            remedy = "plan again, plan = fxshard.plan(model, args, mesh, ...), and ask that plan; pins=plan there keeps these decisions"
            raise PlanError(what, where=f"plan on mesh {self.mesh}", remedy=remedy)
        return self.origin

    @property
    def origin(self) -> Origin | None:
        """What made the plan, in the process that did; no part of what it says, nor of its copies."""
        return vars(self).get(_ORIGIN)

    def made_by(self, origin: Origin) -> ShardingPlan:
        """This plan, which now can be asked."""
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
    def load(path: str | Path, sealed: bool = False) -> ShardingPlan:
        """Reads a plan; raises FileError naming the file and what is wrong with it. ``sealed``: whether the digest must be there."""
        from fxshard.plans.plan_json import load

        return load(ShardingPlan, path, sealed)

    @staticmethod
    def from_json(text: str | bytes, where: str = "<plan>", sealed: bool = False) -> ShardingPlan:
        """Reads a plan from text; raises FileError naming ``where`` and what is wrong."""
        from fxshard.plans.plan_json import loads

        return loads(ShardingPlan, text, where, sealed)

    def __str__(self) -> str:
        from fxshard.plans.plan_text import plan_text

        return plan_text(self)
