"""The options of ``torch.compile(model, backend="fxshard", options={...})``, and checks of options that ``parallelize`` shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.inductor.inductor import inductor_modes, replays_cuda_graphs
from fxshard.cost.optimizer_state import Optimizer
from fxshard.errors import OptionError, PlanError, a_kind, closest
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.ops.random import GENERATORS
from fxshard.passes.after_lowering.optimise import check_without
from fxshard.passes.lowering.generator import check_generator
from fxshard.plans.constraints import OBJECTIVES, Constraint, check_constraints
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.compile.compile import COMPILERS
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.sizes import read_size

MESH_REMEDY = (
    "pass options={'mesh': device_mesh}, with device_mesh = "
    "torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))"
)


@dataclass(frozen=True)
class BackendOptions:
    """The options of the backend.

    ``mesh``: the DeviceMesh to run on; in a single process also a ``fxshard.Mesh`` of one rank. By default the mesh of the DTensors
    in the graph, else that of ``with device_mesh:`` around the call, else the default process group as one axis, ``"world"``.
    ``hardware``: preset or hardware file that prices the plan (default: the mesh's device). ``objective``, ``memory_limit``,
    ``time_limit``, ``pins``, ``input_layouts``, ``output_layouts``, ``constraints``, ``optimizer``: as in ``fxshard.plan``; inputs have
    the names of forward's arguments (``"tokens"``, ``"batch['x']"``), parameters and buffers their names in the module.
    ``example_sizes``: likewise, for the dims that Dynamo leaves open, named after a tensor and its dim (``"tokens_0"``).
    ``plan``: a ShardingPlan or the path of one, made by ``fxshard.plan`` for this model, these arguments and the layouts of its
    tensors. ``dump``: a folder for one readable file per pass. ``compiler``: "inductor" or "eager".
    ``mode``: Inductor's, as in ``torch.compile``, which does not accept it together with options: "max-autotune-no-cudagraphs", "lite".
    ``timeout``: seconds to wait for other ranks, in each collective too. ``debug``: whether ranks compare each collective before it is
    issued (docs/faults.md). ``cache``: whether plans are read from disk and written there.
    ``rng``: "fxshard", whose random numbers do not depend on the mesh, or "torch", whose shards differ. ``without``: names of passes
    after lowering to leave out (docs/after-lowering.md).
    """

    mesh: DeviceMesh | Mesh
    hardware: str | Path | Hardware | None = None
    objective: str = "time"
    memory_limit: float | str | None = None
    time_limit: float | None = None
    pins: Mapping[str, Any] | None = None
    input_layouts: Any = None
    output_layouts: Any = None
    constraints: Sequence[Constraint] = ()
    optimizer: Any = "none"
    example_sizes: Any = None
    plan: ShardingPlan | None = None
    dump: str | Path | None = None
    cache: bool = True
    compiler: str = "inductor"
    mode: str = "default"
    timeout: float = TIMEOUT
    debug: bool = False
    rng: str = GENERATORS[0]
    without: Sequence[str] = ()

    @cached_property
    def planning_mesh(self) -> Mesh:
        """The mesh for the planner: axes, sizes and hardware, without process groups."""
        return as_mesh(self.mesh, self.hardware)


def read_options(given: Mapping[str, Any] | None) -> BackendOptions:
    """Reads and checks the options of ``torch.compile``; raises OptionError for one that is unknown, missing or ill-typed."""
    given = dict(given or {})
    known = [f.name for f in fields(BackendOptions)]
    for name in given:
        if name not in known:
            what = f"the backend fxshard has no option {name!r}{closest(name, known)}"
            raise OptionError(what, remedy=f"its options are {', '.join(known)}")
    _check_mesh(given.get("mesh"))
    check_choice("objective", given.get("objective", OBJECTIVES[0]), OBJECTIVES)
    check_choice("compiler", given.get("compiler", COMPILERS[0]), COMPILERS)
    _check_mode(given.get("mode", "default"), given.get("compiler", COMPILERS[0]))
    check_generator(given.get("rng", GENERATORS[0]))
    check_without(given.get("without", ()))
    check_number("timeout", given.get("timeout", TIMEOUT), optional=False)
    check_flag("cache", given.get("cache", True))
    check_flag("debug", given.get("debug", False))
    check_memory(given.get("memory_limit"), given.get("optimizer"))
    check_number("time_limit", given.get("time_limit"))
    if not isinstance(given.get("pins"), Mapping | None):
        raise OptionError(
            f"pins are a mapping from names to layouts, not {a_kind(given['pins'])}",
            remedy="write pins={'layers.*.wq.weight': 'RS(0)'}; a whole plan goes to the option plan",
        )
    constraints = check_constraints(given.get("constraints"))
    options = BackendOptions(**{**given, "constraints": constraints, "plan": _plan(given.get("plan"))})
    if options.plan is not None:
        check_plan(options.plan, options.planning_mesh)
        check_unused(options.plan, example_sizes=options.example_sizes)
    return options


def _check_mesh(mesh: Any) -> None:
    if isinstance(mesh, Mesh) and mesh.size > 1:
        raise OptionError(
            f"a fxshard.Mesh ({mesh}) says nothing about which process is which rank; the backend runs, so it needs a DeviceMesh",
            remedy=f"{MESH_REMEDY}; or plan without processes: fxshard.plan(model, args, mesh)",
        )
    if isinstance(mesh, Mesh) and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise OptionError("a fxshard.Mesh of one rank is for a process that is alone", remedy=MESH_REMEDY)
    if not isinstance(mesh, DeviceMesh | Mesh):
        raise OptionError(f"the option 'mesh' is {a_kind(mesh)}, not a DeviceMesh", remedy=MESH_REMEDY)


def _check_mode(mode: Any, compiler: str) -> None:
    """Raises OptionError for a mode that Inductor does not have, or that cannot be honoured here."""
    if mode == "default":
        return
    check_choice("mode", mode, tuple(inductor_modes()))
    if compiler != "inductor":
        raise OptionError(
            f"mode {mode!r} is Inductor's, the compiler is {compiler!r}", remedy='leave mode out, or take compiler="inductor"'
        )
    if replays_cuda_graphs(mode):
        what = f"mode {mode!r} replays CUDA graphs, and a recording leaves out what watches a program's collectives for lost ranks"
        raise OptionError(what, remedy='use mode="max-autotune-no-cudagraphs", or leave mode out')


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


def _plan(value: Any) -> ShardingPlan | None:
    if isinstance(value, str | Path):
        return ShardingPlan.load(value)
    if value is not None and not isinstance(value, ShardingPlan):
        raise OptionError(f"the option 'plan' is {a_kind(value)}", remedy="give a ShardingPlan or the path of one")
    return value


def check_source(source: Any, ranks: Sequence[int]) -> None:
    """Raises OptionError unless ``source`` is one of ``ranks``, "same" or None."""
    if source is None or source == "same" or (type(source) is int and source in ranks):
        return
    remedy = f'give one of {list(ranks)}, None, or "same"'
    raise OptionError(f"src_data_rank is {source!r}, which is not a rank of the mesh", remedy=remedy)
