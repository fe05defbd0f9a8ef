"""bind: specialises a program for a rank, with values for ``axis_index`` and process groups for axis names.

The values stay run-time inputs, so that ranks whose shards have equal sizes run the same compiled artefact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.groups import backend_name, register_group_alias
from fxshard.errors import PlanError, RunError
from fxshard.mesh.mesh import as_mesh
from fxshard.program.sharded_program import KINDS, ShardedProgram, SizeClass, is_collective
from fxshard.program.size_inputs import add_size_inputs
from fxshard.runtime.groups import gloo_threads, host_memory
from fxshard.runtime.groups.reduce_scatter import issued_kind, replace_by_all_to_all

AXIS_INPUT = "axis_index_"
GROUP_PREFIX = "fxshard_"


@dataclass(frozen=True)
class BoundProgram:
    """A program for one rank.

    ``module``: its local graph, from ``make_module``. The placeholders are those of ``program.inputs``, then for each axis of ``axes`` an
    int64 scalar, the rank's index on it, then for each of ``program.sizes`` an int, the size in its unit. ``groups``: the registered name
    of each axis' process group; ``backends``: the name of its backend.
    """

    program: ShardedProgram
    device_mesh: DeviceMesh
    coordinate: tuple[int, ...]
    device: torch.device
    make_module: Callable[[], fx.GraphModule]
    axes: tuple[str, ...]
    groups: tuple[tuple[str, str], ...]
    backends: tuple[tuple[str, str], ...] = ()

    @cached_property
    def module(self) -> fx.GraphModule:
        return self.make_module()

    @property
    def size_class(self) -> SizeClass:
        """Ranks of one class run the same artefact. If shard lengths depend on the rank's coordinate, each rank is a class of its own."""
        found = self.program.classes[self.coordinate]
        return (*found, self.coordinate) if self.program.ranks else found

    @cached_property
    def axis_values(self) -> list[torch.Tensor]:
        """The rank's indices on ``axes``, the values of those inputs, on the device."""
        names = self.program.mesh.axis_names
        return [torch.tensor(self.coordinate[names.index(axis)], dtype=torch.int64, device=self.device) for axis in self.axes]


def bind(
    program: ShardedProgram, device_mesh: DeviceMesh, device: torch.device | str | None = None, axes: tuple[str, ...] | None = None
) -> BoundProgram:
    """Binds ``program`` to this process's place in ``device_mesh``; ``device`` defaults to the mesh's current one.

    ``axes``: those of the result, if they are known, as for compiled code; then the local graph is made only if it is asked for.

    Raises PlanError when the program is for another mesh, RunError when this process is not part of the mesh.
    """
    check_mesh(program, device_mesh)
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise RunError("this process is not part of the device mesh", remedy="call it on the ranks of the mesh only")
    groups = {axis: group_name(device_mesh, index) for index, axis in enumerate(program.mesh.axis_names)}
    place = mesh_device(device_mesh, device)
    backends = {axis: _backend(device_mesh, index, place) for index, axis in enumerate(groups)}
    if "gloo" in backends.values():
        gloo_threads.set_policy()
    if place.type == "cpu":
        host_memory.keep_freed(sum(program.plan.memory.values()))
    names = tuple(groups.items()), tuple(backends.items())

    def make() -> tuple[fx.GraphModule, tuple[str, ...]]:
        module, found = bind_graph(program.local(tuple(coordinate)), groups, backends)
        add_size_inputs(module, program.sizes)
        return module, found

    if axes is not None:
        return BoundProgram(program, device_mesh, tuple(coordinate), place, lambda: make()[0], axes, *names)
    module, axes = make()
    return BoundProgram(program, device_mesh, tuple(coordinate), place, lambda: module, axes, *names)


def _backend(device_mesh: DeviceMesh, axis: int, device: torch.device) -> str:
    try:
        return backend_name(device_mesh.get_group(axis), device)
    except RuntimeError as error:
        what = f"the process group of axis {as_mesh(device_mesh).axis_names[axis]} has no backend for {device.type} tensors"
        raise RunError(what, remedy='start it with one, for example init_process_group("cpu:gloo,cuda:nccl")') from error


def fits(program: ShardedProgram, device_mesh: DeviceMesh) -> bool:
    """Whether axes and sizes agree; unnamed axes of a DeviceMesh match by position."""
    have = as_mesh(device_mesh)
    named = device_mesh.mesh_dim_names is not None
    return program.mesh.shape == have.shape and (not named or program.mesh.axis_names == have.axis_names)


def check_mesh(program: ShardedProgram, device_mesh: DeviceMesh) -> None:
    """Raises PlanError, with both meshes, unless they agree (``fits``)."""
    if not fits(program, device_mesh):
        raise PlanError(
            f"the program is for mesh {program.mesh}, the device mesh is {as_mesh(device_mesh)}",
            remedy="plan for this mesh, or start as many ranks as the program has and name the axes as it does",
        )


def mesh_device(device_mesh: DeviceMesh, device: torch.device | str | None = None) -> torch.device:
    """``device``, by default the current device of the mesh's device type."""
    if device is not None:
        return torch.device(device)
    kind = device_mesh.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def bind_graph(
    module: fx.GraphModule, groups: Mapping[str, str], backends: Mapping[str, str] | None = None
) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """(copy of a local graph with ``axis_index`` nodes as trailing inputs and axes replaced by ``groups``, the axes of these inputs).

    ``backends``: the name of each axis' backend, to replace collectives that it lacks; if None, all collectives stay.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    axes: list[str] = []
    for node in list(graph.nodes):
        if node.target is torch.ops.fxshard.axis_index.default:
            axes.append(node.args[0])
            _make_input(graph, node)
        elif is_collective(node):
            axis, kind = node.args[-1], KINDS[node.target]
            node.args = (*node.args[:-1], groups[axis])
            if backends is not None and issued_kind(backends[axis], kind) != kind:
                replace_by_all_to_all(graph, node)
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph), tuple(axes)


def _make_input(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        value = graph.placeholder(AXIS_INPUT + node.args[0])
    value.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(value)
    graph.erase_node(node)


_GROUP_NAMES: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
_LAST_NUMBER: dict[str, int] = {}


def group_name(device_mesh: DeviceMesh, axis: int) -> str:
    """A registered name for the group of one axis: the same on all ranks, while torch's own names differ from group to group.

    Graphs with the same group names share an artefact in Inductor's cache.
    """
    group, kind = device_mesh.get_group(axis), GROUP_PREFIX + as_mesh(device_mesh).axis_names[axis]
    names = _GROUP_NAMES.setdefault(group, {})
    if kind not in names:
        _LAST_NUMBER[kind] = _LAST_NUMBER.get(kind, -1) + 1
        names[kind] = f"{kind}_{_LAST_NUMBER[kind]}"
        register_group_alias(names[kind], group)
    return names[kind]


def axis_of_group(name: str) -> str:
    """The mesh axis of a name from ``group_name``; returns other names unchanged."""
    return name.removeprefix(GROUP_PREFIX).rpartition("_")[0] if name.startswith(GROUP_PREFIX) else name
