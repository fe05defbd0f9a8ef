"""The options of ``torch.compile(model, backend="fxshard", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.inductor.inductor import inductor_modes, replays_cuda_graphs
from fxshard.errors import OptionError, a_kind, count_text
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.plans.parallel import Parallel, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.calls.options import Options, check_choice, check_plan, check_unused, read_options

MESH_REMEDY = (
    "pass options={'mesh': device_mesh}, with device_mesh = "
    "torch.distributed.device_mesh.init_device_mesh('cpu', (2,), mesh_dim_names=('tp',))"
)
OFFLOAD_REMEDY = (
    "use fxshard.parallelize(model, args, device_mesh, memory_limit=..., offload=...), which places both, or plan without offload"
)


@dataclass(frozen=True, kw_only=True)
class BackendOptions(Options):
    """The options of the backend.

    Inputs have the names of forward's arguments (``"tokens"``, ``"batch['x']"``), parameters and buffers their names in the module, and
    the dims of ``example_sizes``, which Dynamo leaves open, are named after a tensor and its dim (``"tokens_0"``).
    ``mesh``: the DeviceMesh to run on; in a single process also a ``fxshard.Mesh`` of one rank. By default the mesh of the DTensors
    in the graph, else that of ``with device_mesh:`` around the call, else the default process group as one axis, ``"world"``.
    ``plan``: a ShardingPlan or the path of one, made by ``fxshard.plan`` for this model, these arguments and the layouts of its
    tensors. ``parallel``: one-word plans by axis, as in ``fxshard.plan``; parameters must already have the layouts that they say.
    ``mode``: Inductor's, as in ``torch.compile``, which does not accept it together with options: "max-autotune-no-cudagraphs", "lite".
    """

    mesh: DeviceMesh | Mesh
    pins: Mapping[str, Any] | None = None
    plan: ShardingPlan | None = None
    parallel: Any = None
    mode: str = "default"

    def __post_init__(self) -> None:
        _check_mesh(self.mesh)
        super().__post_init__()
        _check_mode(self.mode, self.compiler)
        if isinstance(self.pins, ShardingPlan):
            raise OptionError("pins are a mapping from names to layouts", remedy="give a whole plan to the option plan")
        if self.plan is not None:
            check_plan(self.plan, self.planning_mesh)
            check_unused(self.plan, example_sizes=self.example_sizes, parallel=self.parallel)
            if self.plan.offloaded:
                what = f"the plan holds {count_text(len(self.plan.offloaded), 'parameter')}, or their optimiser's state, on the host"
                raise OptionError(f"{what}; the backend leaves both where the caller has them", remedy=OFFLOAD_REMEDY)
        assert self.words is not None

    @cached_property
    def words(self) -> Parallel:
        """The one-word plans by axis."""
        return read_parallel(self.parallel, self.planning_mesh)

    @cached_property
    def planning_mesh(self) -> Mesh:
        """The mesh for the planner: axes, sizes and hardware, without process groups."""
        return as_mesh(self.mesh, self.hardware)


def backend_options(given: Mapping[str, Any]) -> BackendOptions:
    """Reads and checks the options of ``torch.compile``; raises OptionError for one that is unknown, missing or bad."""
    if "offload" in given:
        what = "the backend fxshard takes no 'offload': the caller has made the parameters and steps the optimiser"
        raise OptionError(what, remedy=OFFLOAD_REMEDY)
    return read_options(BackendOptions, {"mesh": None, **given, "plan": _read_plan(given.get("plan"))}, "the backend fxshard")


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
    """Raises OptionError for a mode that Inductor does not have, or that cannot be used here."""
    if mode == "default":
        return
    check_choice("mode", mode, tuple(inductor_modes()))
    if compiler != "inductor":
        raise OptionError(
            f"mode {mode!r} is Inductor's, the compiler is {compiler!r}", remedy='leave mode out, or take compiler="inductor"'
        )
    if replays_cuda_graphs(mode):
        what = f"mode {mode!r} replays CUDA graphs, in which nothing watches a program's collectives for lost ranks"
        raise OptionError(what, remedy='use mode="max-autotune-no-cudagraphs", or leave mode out')


def _read_plan(value: Any) -> ShardingPlan | None:
    if isinstance(value, str | Path):
        return ShardingPlan.load(value)
    if value is not None and not isinstance(value, ShardingPlan):
        raise OptionError(f"the option 'plan' is {a_kind(value)}", remedy="give a ShardingPlan or the path of one")
    return value
