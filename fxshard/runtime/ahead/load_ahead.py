"""load_ahead: a rank's compiled model as a CompiledProgram. It runs the machine code in the program's file."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat.groups import register_group_alias, unregister_group
from fxshard._torch_compat.inductor.ahead import load_model
from fxshard.archive.compiled import CPU_FLAGS, CompiledCode, CompiledModel, axes_of, guards_of_code, model_names
from fxshard.archive.container import fixed_entries
from fxshard.errors import FileError, RunError
from fxshard.files import REMAKE
from fxshard.passes.after_lowering.forward_backward import forward_results
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.ahead.compile_ahead import cpu_flags
from fxshard.runtime.compile.compiled import Artefact, BoxedFunction, CompiledProgram
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.watchdog import Watchdog

AGAIN = "export the program on a machine like this one, or bind it with another compiler"
_GROUPS: dict[str, ref[Any]] = {}
"""The group that is registered under the name of an axis; compiled code finds groups by these names."""


def load_program(code: CompiledCode, bound: BoundProgram, timeout: float = TIMEOUT) -> CompiledProgram:
    """``bound`` by its rank's model in ``code``.

    Raises RunError for code of another kind of machine or device, or if another mesh of this process has an axis of the same name.
    """
    name = model_names(bound.program)[bound.coordinate]
    _check_machine(code.models[name], bound)
    _register_axes(bound)
    compiled = CompiledProgram(bound, partial(_artefact, code, name, bound), Watchdog(bound, timeout))
    compiled.compile()
    return compiled


def axes_of_code(program: ShardedProgram, code: CompiledCode, device_mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of the inputs of this rank's model that are its indices."""
    coordinate = device_mesh.get_coordinate()
    return () if coordinate is None else axes_of(code.models[model_names(program)[tuple(coordinate)]].metadata)


def _artefact(code: CompiledCode, name: str, bound: BoundProgram) -> Artefact:
    model = code.models[name]
    try:
        run = load_model(
            {**fixed_entries(()), **model.entries(name)}, name, code.runner, -1 if bound.device.index is None else bound.device.index
        )
    except (OSError, RuntimeError) as error:
        raise RunError(f"the compiled code cannot be loaded: {str(error).splitlines()[0]}", remedy=AGAIN) from error
    ends = forward_results(bound.program), (), (), (), (), (), (), lambda: (bound.module,), model.written
    return Artefact(_taking_sizes(run, bound), None, *ends, guards=guards_of_code(model, bound.program))


def _taking_sizes(run: BoxedFunction, bound: BoundProgram) -> BoxedFunction:
    """``run`` as a function of inputs that end with dynamic sizes, numbers in their units; the code takes tensors of these sizes."""
    count = len(bound.program.sizes)
    if not count:
        return run

    def carrier(size: int) -> torch.Tensor:
        return torch.empty(size, 0, device=bound.device)

    ranks = [carrier(index + 1) for index in bound.coordinate] if bound.program.ranks else []

    def taking_sizes(inputs: list[Any]) -> Sequence[torch.Tensor]:
        inputs[-count:] = [*map(carrier, inputs[-count:]), *ranks]
        return run(inputs)

    return taking_sizes


def _check_machine(model: CompiledModel, bound: BoundProgram) -> None:
    said = model.metadata
    if model.device != bound.device.type:
        raise RunError(f"the code was compiled for {model.device}, the mesh is on {bound.device.type}", remedy=AGAIN)
    if (machine := said.get("AOTI_MACHINE", "")) != platform.machine():
        raise RunError(f"the code was compiled for {machine}, this machine is {platform.machine()}", remedy=AGAIN)
    if model.device == "cuda":
        _check_gpu(_capability(said.get("AOTI_COMPUTE_CAPABILITY", "0")), bound.device)
    if lacking := sorted(set(said.get(CPU_FLAGS, "").split()) - set(cpu_flags())):
        raise RunError(f"the code was compiled for a CPU with {', '.join(lacking)}, which this one lacks", remedy=AGAIN)


def _capability(said: str) -> int:
    """The compute capability in a model's metadata: 90 for 9.0."""
    if not (said.isascii() and said.isdigit() and len(said) < 10):
        raise FileError(f"the compute capability of the compiled code is {said!r:.40}, no number", where="metadata", remedy=REMAKE)
    return int(said)


def _check_gpu(compiled: int, device: torch.device) -> None:
    """``compiled``: the compute capability for which the code was compiled: 90 for 9.0. Such code runs on later minor versions too."""
    major, minor = torch.cuda.get_device_capability(device)
    if not 10 * major <= compiled <= 10 * major + minor:
        raise RunError(f"the code was compiled for GPUs of compute capability {compiled / 10}, this one has {major}.{minor}", remedy=AGAIN)


def _register_axes(bound: BoundProgram) -> None:
    for index, axis in enumerate(bound.program.mesh.axis_names):
        group, known = bound.device_mesh.get_group(index), _GROUPS[axis]() if axis in _GROUPS else None
        if known is group:
            continue
        try:
            if known is None and axis in _GROUPS:
                unregister_group(axis)
            register_group_alias(axis, group)
        except RuntimeError as error:
            what = f"another process group has the name {axis!r}, by which compiled code finds that of its axis"
            raise RunError(what, remedy="give the programs of a process the same mesh, or axes of other names") from error
        _GROUPS[axis] = ref(group)
