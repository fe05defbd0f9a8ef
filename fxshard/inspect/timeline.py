"""Timelines of programs, and the effects of the passes after lowering, as text."""

from __future__ import annotations

from fxshard.errors import count_text
from fxshard.program.sharded_program import ShardedProgram
from fxshard.text_table import fitted
from fxshard.timeline import DEVICE, Timeline


def passes_table(program: ShardedProgram) -> str:
    """One line per pass after lowering: predicted microseconds of a step, those spent waiting, and its collectives, before and after."""
    if not program.effects:
        return "no passes after lowering: only a program that was lowered in this process knows them"
    rows = [
        (
            effect.name,
            f"{effect.before.total:,.1f} -> {effect.after.total:,.1f}",
            f"{effect.before.waited:,.1f} -> {effect.after.waited:,.1f}",
            f"{effect.collectives[0]} -> {effect.collectives[1]}",
            "yes" if effect.left_out is None else f"no, {effect.left_out}",
        )
        for effect in program.effects
    ]
    return fitted(rows, ("pass", "predicted us", "waited us", "collectives", "taken"), same=False)


def timeline_table(timeline: Timeline, least: float = 0.0) -> str:
    """One line per event, by start; ``least``: microseconds below which operators are left out.

    ``stream``: the device, or the axis of a collective; ``waited``: microseconds for which the device waits for it.
    """
    events = sorted((e for e in timeline.events if e.stream != DEVICE or e.end - e.start >= least), key=lambda e: e.start)
    rows = [(f"{e.start:,.1f}", f"{e.end:,.1f}", e.stream, e.operator, e.name, f"{e.waited:,.1f}" if e.waited else "") for e in events]
    hidden = len(timeline.events) - len(rows)
    head = f"{timeline.total:,.1f} us: {timeline.computing:,.1f} of operators, {timeline.waited:,.1f} waited for "
    head += f"{timeline.communicating:,.1f} of collectives" + (f"; {count_text(hidden, 'short operator')} not shown" if hidden else "")
    return f"{head}\n{fitted(rows, ('start', 'end', 'stream', 'operator', 'node', 'waited'), same=False)}"
