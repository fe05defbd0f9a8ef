"""The passes after lowering, by name and in order; each turns a program into an equivalent one.

A pass's result is used only if the predicted timeline is no longer than before and, under a memory limit, the program still keeps it (or
its peak does not grow). ``program.effects`` records each pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from fxshard._torch_compat.sizes.symbols import oblivious
from fxshard.cost.liveness import BoundaryValue
from fxshard.cost.memory import Stage, profile_stages
from fxshard.errors import OptionError, a_kind, closest
from fxshard.passes.after_lowering.bucket import bucket
from fxshard.passes.after_lowering.chunk import chunk
from fxshard.passes.after_lowering.schedule import predicted, schedule
from fxshard.passes.after_lowering.storages import with_storages
from fxshard.passes.lowering.at_sizes import first_at_memory_sizes
from fxshard.program.sharded_program import ShardedProgram
from fxshard.shapes import distinct
from fxshard.timeline import PassEffect, Timeline

Optimisation = Callable[[ShardedProgram], ShardedProgram]
OPTIMISATIONS: dict[str, Optimisation] = {"schedule": schedule, "chunk": chunk, "bucket": bucket}
"""In the order in which they run."""

NUMERIC_SIZES_ONLY = frozenset({"chunk"})
"""Passes that need numeric sizes; they are skipped for programs with dynamic sizes."""

TIME_TOLERANCE = 1e-9
"""Relative tolerance: sums of many floats depend on their order."""


def check_without(names: Sequence[str]) -> tuple[str, ...]:
    """The names of passes to leave out; raises OptionError for others."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise OptionError(f"without is {a_kind(names)}", where="without", remedy=f"give a list of names among {', '.join(OPTIMISATIONS)}")
    for name in names:
        if name not in OPTIMISATIONS:
            what = f"there is no pass {name!r} to leave out{closest(name, list(OPTIMISATIONS))}"
            raise OptionError(what, where="without", remedy=f"the passes are {', '.join(OPTIMISATIONS)}")
    return tuple(names)


def optimised(program: ShardedProgram, name: str) -> ShardedProgram:
    """``program`` after the named pass, or unchanged if that was no gain; records the effect in either case."""
    before = predicted(program)
    if program.sizes and name in NUMERIC_SIZES_ONLY:
        counts = len(program.collectives), len(program.collectives)
        effect = PassEffect(name, before, before, counts, "it cuts by numbers, and the program's sizes are symbols")
        return program.after_pass(effect, program.guards)
    with oblivious() if program.sizes else contextlib.nullcontext():
        made = OPTIMISATIONS[name](program)
    after = before if made is program else predicted(made)
    reason = _reason_against(program, made, before, after)
    counts = len(program.collectives), len(made.collectives)
    effect = PassEffect(name, before, after, counts, reason)
    guards = distinct((*program.guards, *program.noted_guards()))  # with those that the pass added on the program's symbols
    return (program if reason else made).after_pass(effect, guards)


def _reason_against(program: ShardedProgram, made: ShardedProgram, before: Timeline, after: Timeline) -> str | None:
    if after.total > before.total * (1 + TIME_TOLERANCE):
        return f"it would take {after.total - before.total:.3g} us longer"
    limit = program.plan.memory_limit
    if limit is not None and made is not program and (peak := _peak(made)) > limit and peak > _peak(program):
        return f"it would take {peak - limit:,.0f} bytes more than memory_limit"
    return None


def _peak(program: ShardedProgram) -> int:
    """Peak bytes of the first rank, running its graph in order, with the plan's optimiser state; at the sizes that the plan's memory refers
    to."""
    graph = with_storages(first_at_memory_sizes(program)).graph
    given = {
        n: BoundaryValue(e.kind, e.name) for n, e in zip((n for n in graph.nodes if n.op == "placeholder"), program.inputs, strict=True)
    }
    ends = {v: BoundaryValue(e.kind, e.name) for v, e in zip(graph.output_node().args[0], program.outputs, strict=True) if v is not None}
    return profile_stages([Stage(graph, given, ends)]).peak + program.plan.memory.get("optimizer", 0)
