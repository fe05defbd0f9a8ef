"""What was compiled for a target: kernels with their resources, calls of libraries, collectives in order; as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fxshard._torch_compat.inductor.triton_code import MachineCode
from fxshard.text_table import fitted

COSTLIEST = 12
"""Kernels in the table."""


@dataclass(frozen=True)
class Collective:
    """A collective as the rank issues it: the functional collective's name, and the mesh axis of its process group."""

    kind: str
    axis: str


@dataclass(frozen=True)
class Failure:
    """A kernel that did not compile, and the first lines of the compiler's error."""

    kernel: str
    error: str


@dataclass(frozen=True)
class CompiledGraph:
    """A rank's forward, backward, or (for inference) its one graph. ``launches``: of Triton kernels; ``calls``: of libraries and aten's own
    kernels, with their number."""

    name: str
    kernels: tuple[MachineCode, ...]
    launches: int
    calls: tuple[tuple[str, int], ...]
    collectives: tuple[Collective, ...]
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class TargetReport:
    """A rank's program, compiled for ``target``; ``print`` shows it."""

    target: str
    mesh: str
    coordinate: tuple[int, ...]
    graphs: tuple[CompiledGraph, ...]

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(one for graph in self.graphs for one in graph.failures)

    def to_json(self) -> dict[str, Any]:
        """Plain data; the unit of each number is that of its field."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        place = ", ".join(map(str, self.coordinate))
        parts = [f"compiled for {self.target}, rank ({place}) of {self.mesh}; nothing was launched"]
        return "\n\n".join([*parts, *map(_graph_text, self.graphs)])


def _graph_text(graph: CompiledGraph) -> str:
    kinds = Counter(one.kind for one in graph.kernels)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    size = sum(one.code for one in graph.kernels)
    spilling = sum(one.spilled > 0 for one in graph.kernels)
    spills = f"{spilling} of them spill registers" if spilling else "none spills registers"
    kernels = f"{len(graph.kernels)} Triton kernels ({counted or 'none'})"
    lines = [f"{graph.name}: {kernels}, {graph.launches} launches, {size:,} bytes of code, {spills}"]
    lines += [f"  calls: {', '.join(f'{name} x{count}' for name, count in graph.calls)}"] if graph.calls else []
    lines += [f"  collectives in order: {_runs(graph.collectives)}" if graph.collectives else "  no collectives"]
    lines += [f"  DID NOT COMPILE {one.kernel}: {one.error}" for one in graph.failures]
    costliest = sorted(graph.kernels, key=lambda one: (-one.spilled, -one.registers))[:COSTLIEST]
    rows = [(one.name, one.kind, one.config, one.registers, one.spilled, one.shared_memory, one.code) for one in costliest]
    headers = ("kernel", "kind", "configuration", "registers", "spilled bytes", "shared bytes", "code bytes")
    more = [f"  ({len(graph.kernels) - COSTLIEST} more kernels with fewer registers)"] if len(graph.kernels) > COSTLIEST else []
    return "\n".join([*lines, *([fitted(rows, headers)] if rows else []), *more])


def _runs(collectives: tuple[Collective, ...]) -> str:
    """``all_gather on dp x4, all_reduce on tp``: neighbours that are alike are counted."""
    runs: list[tuple[Collective, int]] = []
    for one in collectives:
        if runs and runs[-1][0] == one:
            runs[-1] = (one, runs[-1][1] + 1)
        else:
            runs.append((one, 1))
    return ", ".join(f"{one.kind} on {one.axis}" + (f" x{count}" if count > 1 else "") for one, count in runs)
