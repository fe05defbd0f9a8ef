"""The options of ``parallelize``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fxshard.errors import OptionError, a_kind
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.runner import Dump
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, check_mixed_precision, check_runs
from fxshard.plans.offload import read_offload
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.options import Options, check_flag

Planner = Callable[[PlanningGraph, Mesh, Request, Dump], ShardingPlan]


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """How the programs of one module are planned and compiled.

    ``mixed_precision``: dtypes to compute and to reduce in, besides those of the parameters. ``planner``: makes the plans.
    ``src_data_rank``: the global number of the rank whose weights and buffers count: it sends the others their shards; "same": each rank
    shards its own values, after comparing samples of them; None: likewise, without the comparison.
    ``offload``: what may be on the host to keep the ``memory_limit``, as in ``fxshard.plan``.
    ``parallel``: one-word plans by axis, as in ``fxshard.plan``.
    ``dynamic``, ``dynamic_shapes``: which dims may change (docs/dynamic-shapes.md).
    """

    mixed_precision: MixedPrecision | None = None
    planner: Planner = plan_graph
    src_data_rank: int | Literal["same"] | None = "same"
    parallel: Any = None
    offload: Any = False
    dynamic: bool | None = None
    dynamic_shapes: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dynamic is not None:
            check_flag("dynamic", self.dynamic)
        if self.dynamic is False and self.dynamic_shapes is not None:
            raise OptionError("dynamic=False contradicts dynamic_shapes", remedy="leave one of them out")
        if self.example_sizes is not None and self.dynamic_shapes is None:
            raise OptionError("example_sizes are of dynamic dims, and there are none", remedy="name them in dynamic_shapes")
        read_offload(self.offload)
        check_runs(check_mixed_precision(self.mixed_precision))
        if not callable(self.planner):
            raise OptionError(f"the planner is {a_kind(self.planner)}", remedy="leave it out, or give a function")
