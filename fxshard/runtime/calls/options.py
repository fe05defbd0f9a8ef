"""The options that ``parallelize`` and the backend of ``torch.compile`` have in common, and checks of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from fxshard.byte_sizes import read_size
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.errors import OptionError, PlanError, a_kind, closest
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.hardware_file import find_hardware
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.ops.random import GENERATORS
from fxshard.passes.after_lowering.optimise import check_without
from fxshard.passes.lowering.generator import check_generator
from fxshard.plans.constraints import OBJECTIVES, Constraint, check_constraints
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.compile.compile import COMPILERS
from fxshard.runtime.ranks.agreement import TIMEOUT


@dataclass(frozen=True, kw_only=True)
class Options:
    """How programs are planned and compiled. Raises OptionError for a bad value.

    ``hardware``: preset or hardware file whose speeds the plan assumes (default: the mesh's device). ``input_layouts``,
    ``output_layouts``: by default plain tensors are replicated, and DTensors keep their layouts. ``objective``, ``memory_limit``,
    ``time_limit``, ``pins``, ``constraints``, ``optimizer``, ``example_sizes``: as in ``fxshard.plan``.
    ``compiler``: "inductor" or "eager". ``timeout``: seconds to wait for other ranks, in planning and in each collective. ``debug``:
    whether ranks compare each collective before they issue it (docs/faults.md). ``dump``: a folder for one readable file per pass.
    ``cache``: whether plans are read from disk and written there. ``rng``: "fxshard", whose random numbers do not depend on the mesh, or
    "torch", whose shards differ. ``without``: names of passes after lowering to leave out (docs/after-lowering.md).
    """

    hardware: str | Path | Hardware | None = None
    input_layouts: Any = None
    output_layouts: Any = None
    pins: Mapping[str, Any] | ShardingPlan | None = None
    memory_limit: float | str | None = None
    objective: str = OBJECTIVES[0]
    time_limit: float | None = None
    constraints: Sequence[Constraint] | None = None
    optimizer: Any = "none"
    example_sizes: Any = None
    compiler: str = COMPILERS[0]
    timeout: float = TIMEOUT
    debug: bool = False
    dump: str | Path | None = None
    cache: bool = True
    rng: str = GENERATORS[0]
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_choice("compiler", self.compiler, COMPILERS)
        check_choice("objective", self.objective, OBJECTIVES)
        check_generator(self.rng)
        check_without(self.without)
        check_number("timeout", self.timeout, optional=False)
        check_memory(self.memory_limit, self.optimizer)
        check_number("time_limit", self.time_limit)
        check_pins(self.pins)
        check_constraints(self.constraints)
        if self.hardware is not None:
            find_hardware(self.hardware)
        if not isinstance(self.dump, str | Path | None):
            raise OptionError(f"dump is {a_kind(self.dump)}", remedy="give a folder")
        check_flag("cache", self.cache)
        check_flag("debug", self.debug)


DECIDING = ("objective", "memory_limit", "pins", "constraints", "parallel", "offload", "input_layouts", "output_layouts")
"""Options that decide the plan, for which the first rank's alone would count."""


def option_fields(options: Options) -> dict[str, str]:
    """Fields of ``compare``: the options that decide the plan, as text; without those whose text differs between processes."""
    given = {name: getattr(options, name, None) for name in DECIDING}
    texts = {name: value.hash if isinstance(value, ShardingPlan) else repr(value) for name, value in given.items() if value is not None}
    return {name: text for name, text in texts.items() if " at 0x" not in text}


Kind = TypeVar("Kind", bound=Options)
P = ParamSpec("P")
R = TypeVar("R")
KEYWORDS = ("kwargs", "keywords", "kwarg", "example_kwarg")
"""Names that users try for ``example_kwargs``."""


def read_options(kind: type[Kind], given: Mapping[str, Any], who: str) -> Kind:
    """The options ``given`` to ``who`` by name; raises OptionError for one that is unknown or bad."""
    _check_known(given, [f.name for f in fields(kind)], who, who == "parallelize")
    return kind(**given)


def with_known_options(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which answers a keyword argument that it does not have with an OptionError that names the one that was meant."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _check_known(kwargs, known, function.__name__, "example_kwargs" in known)
        return function(*args, **kwargs)

    return call


def _check_known(given: Iterable[str], known: Sequence[str], who: str, has_example: bool) -> None:
    for name in given:
        if name in KEYWORDS and has_example:
            raise OptionError(f"{who} has no option {name!r}", remedy="pass the model's keyword arguments as example_kwargs={...}")
        if name not in known:
            raise OptionError(f"{who} has no option {name!r}{closest(name, known)}", remedy=f"its options are {', '.join(known)}")


def check_device_mesh(mesh: Any) -> None:
    """Raises OptionError unless ``mesh`` is a DeviceMesh: only that says which process is which rank."""
    if isinstance(mesh, DeviceMesh):
        return
    what = "a fxshard.Mesh says nothing about which process is which rank" if isinstance(mesh, Mesh) else f"the mesh is {a_kind(mesh)}"
    make = "torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))"
    raise OptionError(f"{what}; a torch DeviceMesh is needed", remedy=f"pass device_mesh = {make}")


def check_pins(pins: Any) -> None:
    """Raises OptionError unless ``pins`` map names to layouts, or are a ShardingPlan."""
    if not isinstance(pins, Mapping | ShardingPlan | None) or (isinstance(pins, Mapping) and not all(isinstance(n, str) for n in pins)):
        remedy = "write pins={'layers.*.wq.weight': 'RS(0)'}, or pass a ShardingPlan"
        raise OptionError(f"pins map names to layouts, these are {a_kind(pins)}: {pins!r:.60}", remedy=remedy)


def check_unused(plan: Any, **others: Any) -> None:
    """Raises OptionError if there is a ``plan`` and one of ``others``, options by name, is set: the plan already decides these."""
    said = [name for name, value in others.items() if value is not None and not (name == "objective" and value == OBJECTIVES[0])]
    if plan is not None and said:
        what = f"a plan is given, so that {', '.join(said)} would be ignored"
        raise OptionError(what, remedy="leave them out, or leave out the plan and let one be made")


def check_plan(plan: Any, mesh: Mesh | DeviceMesh | None = None) -> None:
    """Raises OptionError if ``plan`` is not a ShardingPlan, PlanError if it is for another mesh."""
    if not isinstance(plan, ShardingPlan):
        raise OptionError(f"plan is {a_kind(plan)}", remedy="pass a ShardingPlan; ShardingPlan.load(path) reads one from a file")
    have = None if mesh is None else as_mesh(mesh)
    if have is not None and (have.shape, have.axis_names) != (plan.mesh.shape, plan.mesh.axis_names):
        raise PlanError(f"the plan is for mesh {plan.mesh}, not {have}", remedy="plan for this mesh, or run on the plan's")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"unknown {name} {value!r}{closest(value, choices)}", remedy=f"use one of {', '.join(choices)}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"the option {name!r} is {value!r}", remedy="give True or False")


def check_number(name: str, value: Any, *, optional: bool = True) -> None:
    if not (optional and value is None) and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        what = f"the option {name!r} is {value!r}, not a positive number"
        raise OptionError(what, remedy="give seconds")


def check_weights(weights: Any) -> None:
    """Raises OptionError unless ``weights`` map names to values, or are None."""
    if not isinstance(weights, Mapping | None):
        remedy = "pass whole tensors by the model's names, such as a state_dict"
        raise OptionError(f"weights are {a_kind(weights)}", remedy=remedy)


def check_memory(limit: Any, optimizer: Any) -> None:
    """Raises OptionError unless ``limit`` is a positive size or None, and ``optimizer`` one whose state is known."""
    if limit is not None and not read_size(limit, "memory_limit"):
        raise OptionError("memory_limit is 0", where="memory_limit", remedy="give bytes per device, for example '80GB'")
    Optimizer.of(optimizer)


def check_source(source: Any, ranks: Sequence[int]) -> None:
    """Raises OptionError unless ``source`` is one of ``ranks``, "same" or None."""
    if source is None or source == "same" or (type(source) is int and source in ranks):
        return
    remedy = f'give one of {list(ranks)}, None, or "same"'
    raise OptionError(f"src_data_rank is {source!r}, which is not a rank of the mesh", remedy=remedy)
