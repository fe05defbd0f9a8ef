"""The effects of the passes after lowering, as text."""

from __future__ import annotations

from fxshard.program.sharded_program import ShardedProgram
from fxshard.text_table import fitted


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
