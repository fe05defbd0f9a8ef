"""A live plan or program as text: the views of the fields of its file."""

from __future__ import annotations

from collections.abc import Sequence

from fxshard.inspect.data import Subject, plan_of
from fxshard.plans.plan_text import view_of
from fxshard.program.fields import program_fields
from fxshard.program.sharded_program import ShardedProgram
from fxshard.views import tables
from fxshard.views.issued import issued_table
from fxshard.views.screen import screen


def summary(subject: Subject) -> str:
    """The screen: model, mesh, objective with its proof, time of a step, memory, layouts by module, the costliest collectives; for a
    program also its inputs and outputs, dynamic sizes and guards."""
    return screen(view_of(plan_of(subject)), program_fields(subject) if isinstance(subject, ShardedProgram) else None)


def nodes_table(subject: Subject, globs: Sequence[str] = ()) -> str:
    """One line per node: operator, input and output layouts, global shapes, estimated microseconds. ``globs``: only nodes of which a name
    matches: their own, the user's, or their module's; raises OptionError if one matches nothing."""
    return tables.nodes_table(view_of(plan_of(subject)), globs)


def parameters_table(subject: Subject, globs: Sequence[str] = ()) -> str:
    """One line per parameter and buffer: layout, global shape, dtype, bytes whole and per device."""
    return tables.parameters_table(view_of(plan_of(subject)), globs)


def collectives_table(subject: Subject, globs: Sequence[str] = ()) -> str:
    """One line per collective, with the bytes that each rank sends: a plan's, numbered as for ``plan.why_collective``, or a program's."""
    if isinstance(subject, ShardedProgram):
        return issued_table(view_of(subject.plan), program_fields(subject))
    return tables.collectives_table(view_of(subject), globs)
