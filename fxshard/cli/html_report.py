"""``--html``: the report of ``fxshard plan`` and ``fxshard inspect`` as one HTML page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.errors import OptionError
from fxshard.progress import progress

if TYPE_CHECKING:
    from fxshard.plans.explanation import Explanation
    from fxshard.plans.sharding_plan import ShardingPlan


def add_html(parser: argparse.ArgumentParser, alternatives: bool = False) -> None:
    """Adds ``--html``, and ``--alternatives`` where plans are made."""
    html_help = "write an HTML page here with the graph, tensors on the mesh, the timeline, memory, and what --explain answers"
    parser.add_argument("--html", metavar="REPORT.html", help=html_help if alternatives else html_help.rpartition(", and")[0])
    if alternatives:
        many_help = "with --html: also what other layouts of the N values that cost most would cost (seconds to minutes each; default 0)"
        parser.add_argument("--alternatives", type=int, default=0, metavar="N", help=many_help)


def check_html(options: argparse.Namespace) -> None:
    """Checks, before long work, that the page can be written."""
    from fxshard.files import check_writable

    if options.html:
        check_writable(options.html)
    wanted = getattr(options, "alternatives", 0)
    if wanted < 0:
        raise OptionError(f"--alternatives is {wanted}", remedy="give a number of values, 0 or more")
    if wanted and not options.html:
        raise OptionError("--alternatives without --html would have no effect", remedy="add --html REPORT.html, or ask with --explain NAME")


def write_plan_report(options: argparse.Namespace, plan: ShardingPlan, answers: Sequence[Explanation]) -> bool:
    """Writes the report of a plan that was just made, if it is asked for; returns whether it was."""
    if not options.html:
        return False
    from fxshard.runtime.report import save_report

    title = f"{Path(options.model.rpartition(':')[0]).name}:{options.model.rpartition(':')[2]}"
    with progress("writing the report"):
        save_report(plan, options.html, title=title, answers=answers, alternatives=options.alternatives)
    return True


def write_file_report(file: str, subject: Any, path: str) -> None:
    """Writes the report of a plan or program that was read from ``file``."""
    from fxshard.runtime.report import save_report

    save_report(subject, path, title=Path(file).name)
