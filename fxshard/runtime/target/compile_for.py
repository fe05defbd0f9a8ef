"""compile_for: a rank's real program through Inductor to machine code of a GPU that this machine does not have."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping

from fxshard._torch_compat.inductor.triton_code import MachineCode, calls_in_order, kernel_sources, machine_code
from fxshard._torch_compat.inductor.without_gpu import check_target, without_gpu
from fxshard.errors import OptionError
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.rank_graph.fake_ranks import fake_ranks
from fxshard.runtime.target.report import Collective, CompiledGraph, Failure, TargetReport

log = logging.getLogger("fxshard")
COLLECTIVE = re.compile(r"torch\.ops\._c10d_functional\.(\w+)")
WAIT = "wait_tensor"


def compile_for(
    program: ShardedProgram, target: str, coordinate: tuple[int, ...] | None = None, every_config: bool = False
) -> TargetReport:
    """Compiles the rank at ``coordinate`` (by default the first) for ``target``: sm_80, sm_90 or sm_100.

    Inductor writes the code that it would write on the GPU, and Triton compiles each kernel to machine code, in the first of the
    configurations that Inductor would tune between, or in all with ``every_config``. Products stay calls of cuBLAS, attention of aten's
    kernels. A kernel that does not compile is in ``report.failures``. Call it in a process of its own: it needs torch's fake process
    group. Raises OptionError for an unknown target or rank, or without Triton; RunError if Inductor fails or the process has a group.
    """
    check_target(target)
    if coordinate is not None and coordinate not in set(program.mesh.coordinates()):
        remedy = f"give one index per axis of {program.mesh}, each below its size; None is the first rank"
        raise OptionError(f"mesh {program.mesh} has no rank at {coordinate!r}", where="coordinate", remedy=remedy)
    with without_gpu(target) as wrappers, fake_ranks(program, coordinate, "cuda") as bound:
        compile_program(bound, "inductor", cache=False)
        axes = {name: axis for axis, name in bound.groups}
        names = ("forward", "backward") if len(wrappers) == 2 else ("program",) * len(wrappers)
        known: dict[str, tuple[MachineCode, ...] | Failure] = {}
        graphs = tuple(_compiled(name, code, axes, every_config, known) for name, code in zip(names, wrappers, strict=True))
    return TargetReport(target, str(program.mesh), bound.coordinate, graphs)


def _compiled(
    name: str, wrapper: str, axes: Mapping[str, str], every_config: bool, known: dict[str, tuple[MachineCode, ...] | Failure]
) -> CompiledGraph:
    """``known``: what was compiled, by source, so that equal kernels of both graphs are compiled once."""
    sources = kernel_sources(wrapper)
    for kernel, source in sources.items():
        if source not in known:
            known[source] = _machine_code(kernel, source, every_config)
    found = [known[source] for source in sources.values()]
    called = calls_in_order(wrapper)
    collectives = [(match.group(1), line) for call, line in called if (match := COLLECTIVE.match(call)) and match.group(1) != WAIT]
    libraries = Counter(call for call, _ in called if call not in sources and not COLLECTIVE.match(call))
    return CompiledGraph(
        name,
        tuple(one for codes in found if not isinstance(codes, Failure) for one in codes),
        sum(call in sources for call, _ in called),
        tuple(libraries.most_common()),
        tuple(Collective(kind, _axis(line, axes)) for kind, line in collectives),
        tuple(one for one in found if isinstance(one, Failure)),
    )


def _machine_code(kernel: str, source: str, every_config: bool) -> tuple[MachineCode, ...] | Failure:
    log.info("compiling %s", kernel)
    try:
        return tuple(machine_code(kernel, source, every_config))
    except Exception as error:  # of Triton's compiler or NVIDIA's assembler: reported by kernel
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        return Failure(kernel, " ".join(lines[:3])[:400])


def _axis(line: str, axes: Mapping[str, str]) -> str:
    """The axis whose group's name stands in a line of code."""
    return next((axis for name, axis in axes.items() if f"'{name}'" in line), "?")
