"""A step of a program on this rank, measured by torch.profiler beside its prediction."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.profiler import ProfilerActivity, record_function

from fxshard.errors import OptionError, RunError, a_kind
from fxshard.files import atomic_file
from fxshard.passes.after_lowering.forward_backward import forward_nodes
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.program.sharded_program import KINDS, ShardedProgram, is_collective, is_wait
from fxshard.runtime.ranks.record import in_order_of_issue
from fxshard.timeline import Timeline
from fxshard.views.measured.step import STEP, MeasuredStep, backend_of, both_table, both_traces, measured_step

WARM_UP = 2
"""Steps before the one that is measured: the first compiles and allocates."""


@dataclass(frozen=True)
class StepProfile:
    """A predicted and a measured step of one rank. ``print`` shows a table of both, ``save`` writes a trace for Perfetto."""

    predicted: Timeline
    measured: MeasuredStep
    axes: tuple[str, ...]
    rank: int

    def trace(self) -> dict[str, Any]:
        """Both steps in Chrome's trace format, each as a process; both begin at 0."""
        return both_traces(self.predicted, self.measured, self.axes, self.rank)

    def save(self, path: str | Path) -> None:
        """Writes the trace as JSON, which ui.perfetto.dev and chrome://tracing open. Raises FileError."""
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(self.trace()), encoding="utf-8")

    def __str__(self) -> str:
        return both_table(self.predicted, self.measured, self.axes)


def profile_step(
    step: Callable[[], object], program: ShardedProgram, warm_up: int = WARM_UP, *, sizes: Mapping[str, int] | None = None
) -> StepProfile:
    """Runs ``step`` and measures it with torch.profiler. On several ranks, each calls this, since a step communicates.

    Args:
        step: runs the program once: ``lambda: sharded(tokens, targets).backward()``, or a call of a bound program. It is called
            ``warm_up`` + 1 times, and what it changes (parameters, state) stays changed.
        program: what the step runs, whose timeline is the prediction; ``sharded.forward.programs[0]``, or an exported program.
        sizes: the sizes of a program's dynamic dims in ``step``, by name: ``{"rows": 64}``. The prediction is for these.

    Times of the prediction are those of the program's mesh: make it with ``hardware=`` as ``fxshard calibrate`` measured, for a fair
    comparison. Raises OptionError for what is no program, or if ``sizes`` are not those of its dynamic dims, SizesError if it does not
    serve them, RunError if the profiler recorded no step, or none of the waits that the program has (AOTInductor's code records none).
    """
    if not isinstance(program, ShardedProgram):
        raise OptionError(
            f"cannot profile {a_kind(program)}", where="program", remedy="give sharded.forward.programs[0], or an exported program"
        )
    there = _at_sizes(program, sizes or {})
    for _ in range(warm_up):
        step()
    names = {f"{target.namespace}::{target.overloadpacket.__name__}" for target in KINDS}
    events = _recorded(step)
    issues, waits = axes_in_order(program, backend_of(events))
    try:
        found = measured_step(events, issues, waits, names)
    except ValueError as error:
        raise RunError(f"the profiler recorded no step: {error}", remedy="stop other profilers of this process") from error
    if waits and not found.waits:
        what = f"the profiler recorded none of the program's {len(waits)} waits for collectives"
        remedy = "let the step run this program, compiled by inductor or eager: AOTInductor's code waits without an event"
        raise RunError(what, where="step", remedy=remedy)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return StepProfile(predicted(there), found, program.mesh.axis_names, rank)


def _at_sizes(program: ShardedProgram, sizes: Mapping[str, int]) -> ShardedProgram:
    names = [one.name for one in program.sizes]
    if sorted(names) != sorted(sizes):
        what = f"the program's dynamic sizes are {', '.join(names) or 'none'}; given are {', '.join(sizes) or 'none'}"
        raise OptionError(what, where="sizes", remedy='give the size of each in the step by name, for example sizes={"rows": 64}')
    return program_at(program, sizes)


def _recorded(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The events of a profiled step, as in the profiler's Chrome trace."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as profiler, record_function(STEP):
        step()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def axes_in_order(program: ShardedProgram, backend: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(axis, kind) of the collectives as a rank issues them on ``backend``, and axes as it waits for them: the forward's, then the
    backward's."""
    issues = [(c.axis, c.kind) for c in in_order_of_issue(program, dict.fromkeys(program.mesh.axis_names, backend))]
    graph = program.first.graph
    forward = forward_nodes(program, graph)
    waits = [n for n in graph.nodes if is_wait(n)]
    return issues, _axes([n for n in waits if n in forward]) + _axes([n for n in waits if n not in forward])


def _axes(waits: Sequence[fx.Node]) -> list[str]:
    return [str(begun.args[-1]) for wait in waits if is_collective(begun := wait.all_input_nodes[0])]
