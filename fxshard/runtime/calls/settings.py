"""The options of ``parallelize``: how the programs of a module are planned and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fxshard.errors import OptionError, a_kind, closest
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.hardware_file import find_hardware
from fxshard.mesh.mesh import Mesh
from fxshard.ops.random import GENERATORS
from fxshard.passes.after_lowering.optimise import check_without
from fxshard.passes.lowering.generator import check_generator
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.runner import Dump
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, check_mixed_precision
from fxshard.plans.constraints import OBJECTIVES, Constraint, check_constraints
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.options import check_choice, check_flag, check_memory, check_number, check_pins
from fxshard.runtime.compile.compile import COMPILERS
from fxshard.runtime.ranks.agreement import TIMEOUT

Planner = Callable[[PlanningGraph, Mesh, Request, Dump], ShardingPlan]


@dataclass(frozen=True)
class Settings:
    """How the programs of one module are planned and compiled; fields as in ``parallelize``."""

    hardware: str | Path | Hardware | None = None
    input_layouts: Any = None
    output_layouts: Any = None
    pins: Any = None
    memory_limit: float | str | None = None
    objective: str = "time"
    time_limit: float | None = None
    constraints: Sequence[Constraint] | None = None
    optimizer: Any = "none"
    compiler: str = "inductor"
    timeout: float = TIMEOUT
    debug: bool = False
    dump: str | Path | None = None
    cache: bool = True
    rng: str = GENERATORS[0]
    without: Sequence[str] = ()
    mixed_precision: MixedPrecision | None = None
    planner: Planner = plan_graph
    src_data_rank: int | Literal["same"] | None = "same"
    dynamic: bool | None = None
    dynamic_shapes: Any = None
    example_sizes: Any = None


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Settings from ``options`` by name; raises OptionError for an unknown name or a bad value."""
    known = list(Settings.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise OptionError(f"parallelize has no option {name!r}{closest(name, known)}", remedy=f"its options are {', '.join(known)}")
    settings = Settings(**options)
    check_choice("compiler", settings.compiler, COMPILERS)
    check_choice("objective", settings.objective, OBJECTIVES)
    check_generator(settings.rng)
    check_without(settings.without)
    check_number("timeout", settings.timeout, optional=False)
    check_memory(settings.memory_limit, settings.optimizer)
    check_number("time_limit", settings.time_limit)
    check_pins(settings.pins)
    check_constraints(settings.constraints)
    if settings.hardware is not None:
        find_hardware(settings.hardware)
    if not isinstance(settings.dump, str | Path | None):
        raise OptionError(f"dump is {a_kind(settings.dump)}", remedy="give a folder")
    check_flag("cache", settings.cache)
    check_flag("debug", settings.debug)
    if settings.dynamic is not None:
        check_flag("dynamic", settings.dynamic)
    if settings.dynamic is False and settings.dynamic_shapes is not None:
        raise OptionError("dynamic=False contradicts dynamic_shapes", remedy="leave one of them out")
    if settings.example_sizes is not None and settings.dynamic_shapes is None:
        raise OptionError("example_sizes are of dynamic dims, and there are none", remedy="name them in dynamic_shapes")
    check_mixed_precision(settings.mixed_precision)
    if not callable(settings.planner):
        raise OptionError(f"the planner is {a_kind(settings.planner)}", remedy="leave it out, or give a function")
    return settings
