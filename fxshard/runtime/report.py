"""save_report: the HTML report of a plan or program, with its predicted timeline, memory and alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fxshard.errors import FxshardError, OptionError, a_kind
from fxshard.files import atomic_file
from fxshard.inspect.report import Parts, costliest, report_html
from fxshard.memory_profile import MemoryProfile
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.passes.pipeline import lower_plan
from fxshard.passes.planning.origin import Origin
from fxshard.plans.explanation import Explanation
from fxshard.plans.plan_text import view_of
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.views.timeline import plan_timeline

HOW = (
    "fxshard plan FILE.py:FACTORY … --html REPORT.html makes a report with it, and so does save_report(plan, path) where the plan was made."
)
WITHOUT_GRAPH = f"A plan's file does not contain the graph that this needs. {HOW}"
IN_PLAN_ORDER = f"In the order of the plan, one node after another; the order of execution needs the graph. {HOW}"
WITHOUT_EDGES = f"This plan does not know what its nodes read, so only the edges of redistributions are drawn. {HOW}"


def save_report(
    subject: ShardingPlan | ShardedProgram,
    path: str | Path,
    title: str | None = None,
    answers: Sequence[Explanation] = (),
    alternatives: int = 0,
) -> None:
    """Writes the report of a plan or program to ``path``, atomically: one HTML page that loads nothing.

    ``title``: of the page (default: the model's class). ``answers``: results of ``plan.explain`` to show. ``alternatives``: asks about so
    many values more, those that cost most. A plan that ``fxshard.plan`` made in this process is lowered for its timeline; a program has
    one. Of a plan that was read from a file or copied, the timeline is in the order of its nodes and memory over time is unknown; the page
    says so.

    Raises:
        FileError: the path cannot be written. PlanError: alternatives of a plan that does not know its graph. OptionError: not a plan or
            program.
    """
    if not isinstance(subject, (ShardingPlan, ShardedProgram)):
        raise OptionError(f"cannot report on {a_kind(subject)}", remedy="pass a plan or a program")
    plan = subject.plan if isinstance(subject, ShardedProgram) else subject
    asked = {answer.name for answer in answers}
    names = [name for name in costliest(plan, alternatives + len(asked)) if name not in asked][:alternatives]
    more = [plan.explain(name) for name in names]
    text = report_html(subject, _parts(subject, title or plan.model or "fxshard", (*answers, *more)))
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _parts(subject: ShardingPlan | ShardedProgram, title: str, answers: tuple[Explanation, ...]) -> Parts:
    plan = subject.plan if isinstance(subject, ShardedProgram) else subject
    missing = {} if plan.reads else {"graph": WITHOUT_EDGES}
    if plan.origin is None:
        missing["alternatives"] = WITHOUT_GRAPH
    program = subject if isinstance(subject, ShardedProgram) else _lowered(subject, missing)
    memory = _memory(subject, missing)
    timeline = plan_timeline(view_of(plan)) if program is None else predicted(program)
    return Parts(title, program, timeline, memory, answers, missing)


def _lowered(plan: ShardingPlan, missing: dict[str, str]) -> ShardedProgram | None:
    """The program of a plan that knows its graph."""
    if not isinstance(plan.origin, Origin):
        missing["timeline"] = IN_PLAN_ORDER
        return None
    try:
        return lower_plan(plan.origin.annotated.graph, plan)
    except FxshardError as error:
        missing["timeline"] = f"In the order of the plan, because it cannot be lowered: {error}"
        return None


def _memory(subject: ShardingPlan | ShardedProgram, missing: dict[str, str]) -> MemoryProfile | None:
    """The plan's own estimate, which its limit refers to; for a program without the plan's graph, that of its first rank."""
    plan = subject.plan if isinstance(subject, ShardedProgram) else subject
    if plan.origin is not None:
        return plan.memory_profile()
    if isinstance(subject, ShardedProgram):
        return program_memory(subject)
    missing["memory"] = WITHOUT_GRAPH
    return None
