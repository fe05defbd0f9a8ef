"""compile_ahead: a program as one compiled model per size class, without a process group."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from fxshard._torch_compat import OpOverload
from fxshard._torch_compat.inductor.ahead import compile_ahead as compile_graph
from fxshard._torch_compat.inductor.ahead import group_names
from fxshard._torch_compat.inductor.compiled_runner import build_runner
from fxshard._torch_compat.sizes.symbols import oblivious
from fxshard.archive.compiled import CPU_FLAGS, GUARDS, WRITTEN, CompiledCode, CompiledModel, bounds_in_words, describe, model_names
from fxshard.archive.sizes import write_guards
from fxshard.errors import OptionError, RunError
from fxshard.files import write_json
from fxshard.program.sharded_program import ShardedProgram
from fxshard.program.size_inputs import add_size_inputs, sizes_as_tensors
from fxshard.runtime.compile.compiled import without_autocast
from fxshard.runtime.rank_graph.bind import bind_graph
from fxshard.runtime.rank_graph.common_subexpressions import merge_equal_calls
from fxshard.runtime.rank_graph.expand_draws import expand_draws
from fxshard.runtime.rank_graph.in_place import write_in_place
from fxshard.runtime.rank_graph.rank_graph import has_backward, in_device_operators

log = logging.getLogger("fxshard")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The backend for which code for a device is compiled."""
NAMESPACES = ("aten", "prims", "_c10d_functional")
"""Namespaces of the operators that a process without Python has."""
X86 = ("avx", "sse", "ssse", "pni", "amx", "bmi", "abm", "fma", "f16c", "popcnt", "adx", "aes", "vaes", "pclmul", "vpclmul", "gfni", "sha")
ARM = ("asimd", "sve", "sme", "i8mm", "bf16", "fphp", "sha", "crc32", "atomics")
"""How Linux's names of the instructions begin that a compiler uses for the machine on which it runs."""


def compile_ahead(program: ShardedProgram, device: str) -> CompiledCode:
    """The code of ``program``, for ``"cpu"`` or ``"cuda"``.

    Needs a C++ compiler; a minute or so per size class. A model serves all dynamic sizes, and all ranks of its class. Raises OptionError
    for a program that compiled code cannot hold: with a backward apart from a step, or with operators that are written in Python.
    """
    if has_backward(program):
        remedy = "export the whole step with optimizer=, or without aot_inductor"
        raise OptionError("compiled code has no gradients, the program has a backward", where="aot_inductor", remedy=remedy)
    mesh, models = program.mesh, dict[str, CompiledModel]()
    for coordinate, name in model_names(program).items():
        if name not in models:
            log.info("compiling %s of the ranks like %s ahead of time", name, coordinate)
            with group_names(dict(zip(mesh.axis_names, mesh.shape, strict=True))), without_autocast(device):
                models[name] = _compiled(program, coordinate, torch.device(device))
    if program.sizes:
        guards = {GUARDS: write_json({"guards": write_guards(program.noted_guards())}), **bounds_in_words(program, program.noted_guards())}
        models = {name: replace(model, metadata={**model.metadata, **guards}) for name, model in models.items()}
    return CompiledCode(models, _built_runner())


def _built_runner() -> bytes:
    try:
        return build_runner()
    except (OSError, RuntimeError) as error:
        what = f"the library that runs compiled code cannot be built: {str(error).splitlines()[0]}"
        raise RunError(what, remedy="name a C++ compiler in CXX; make prerequisites says what is missing") from error


def _compiled(program: ShardedProgram, coordinate: tuple[int, ...], device: torch.device) -> CompiledModel:
    axes, sizes = program.mesh.axis_names, (*program.sizes, *program.ranks)
    graph = program.modules[program.classes[coordinate]]
    with oblivious() if sizes else contextlib.nullcontext():
        module, indices = bind_graph(graph, dict(zip(axes, axes, strict=True)), dict.fromkeys(axes, BACKENDS[device.type]))
        add_size_inputs(module, sizes)
        module = in_device_operators(program, module, device, "inductor")
        merge_equal_calls(module)
        expand_draws(module, keys_too=True)
        written = () if sizes else write_in_place(program, module.graph)
        if sizes:
            sizes_as_tensors(module, len(sizes), device)
        for target in _only_in_python(module):
            remedy = "export without aot_inductor, or pin layouts that do without the operator"
            raise OptionError(f"the program calls {target}, which needs Python when it runs", where="aot_inductor", remedy=remedy)
        library, calls, metadata = _code_of(module)
    metadata |= {CPU_FLAGS: " ".join(cpu_flags()), WRITTEN: " ".join(map(str, written))}
    return CompiledModel(library, calls, metadata | describe(program, indices))


def _code_of(module: fx.GraphModule) -> tuple[bytes, bytes, dict[str, str]]:
    try:
        return compile_graph(module)
    except Exception as error:
        what = f"AOTInductor could not compile the program: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        raise RunError(what, remedy="export without aot_inductor: ranks then compile the program by Inductor, or run it eagerly") from error


def _only_in_python(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.namespace not in NAMESPACES:
            yield str(node.target)


def cpu_flags() -> tuple[str, ...]:
    """The instructions of this machine's CPU that code compiled for it may use; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    found = next((line.partition(":")[2].split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    return tuple(sorted({flag for flag in found if flag.startswith((*X86, *ARM))}))
