"""load_ahead: a rank's compiled model as a CompiledProgram. It runs the machine code in the program's file."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any
from weakref import ref

from fxshard._torch_compat.groups import register_group_alias, unregister_group
from fxshard._torch_compat.inductor.ahead import load_model
from fxshard.archive.compiled import CPU_FLAGS, CompiledCode, CompiledModel, axes_of, model_names
from fxshard.archive.container import fixed_entries
from fxshard.errors import RunError
from fxshard.passes.after_lowering.forward_backward import forward_results
from fxshard.runtime.ahead.compile_ahead import cpu_flags
from fxshard.runtime.compile.compiled import Artefact, CompiledProgram
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


def _artefact(code: CompiledCode, name: str, bound: BoundProgram) -> Artefact:
    model = code.models[name]
    try:
        run = load_model(
            {**fixed_entries(()), **model.entries(name)}, name, code.runner, -1 if bound.device.index is None else bound.device.index
        )
    except (OSError, RuntimeError) as error:
        raise RunError(f"the compiled code cannot be loaded: {str(error).splitlines()[0]}", remedy=AGAIN) from error
    return Artefact(run, None, forward_results(bound.program), (), (), (), (), (), lambda: (bound.module,), model.written)


def _check_machine(model: CompiledModel, bound: BoundProgram) -> None:
    said = model.metadata
    if model.device != bound.device.type:
        raise RunError(f"the code was compiled for {model.device}, the mesh is on {bound.device.type}", remedy=AGAIN)
    if axes_of(said) != bound.axes:
        raise RunError("the compiled code takes other indices than the program", remedy="export it again")
    if (machine := said.get("AOTI_MACHINE", "")) != platform.machine():
        raise RunError(f"the code was compiled for {machine}, this machine is {platform.machine()}", remedy=AGAIN)
    if lacking := sorted(set(said.get(CPU_FLAGS, "").split()) - set(cpu_flags())):
        raise RunError(f"the code was compiled for a CPU with {', '.join(lacking)}, which this one lacks", remedy=AGAIN)


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
