"""Plans and programs in notebooks."""

from __future__ import annotations

import html

from fxshard.views.fallbacks import by_cause
from fxshard.views.plan_view import Fields, PlanView
from fxshard.views.screen import costliest, head, layouts, program_parts
from fxshard.views.tables import collectives_table, nodes_table

FOLDED = 2000
"""Rows that a folded table has at most: a notebook keeps all of them."""


def plan_html(view: PlanView, program: Fields | None = None) -> str:
    """The screen, with all nodes and collectives folded below."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(label)}</th><td style="text-align:left">{html.escape(text)}</td></tr>'
        for label, text in head(view, program)
    )
    parts = [f"<table>{rows}</table>", _text(layouts(view)), _text(costliest(view))]
    parts += [] if program is None else [_text(part) for part in program_parts(view, program)]
    parts += [
        _folded(heading, "\n".join(f"{node}: {reason}" for node, reason in found)) for heading, found in by_cause(view.fallbacks).items()
    ]
    if len(view.collectives) <= FOLDED and view.collectives:
        parts.append(_folded(f"all {len(view.collectives)} collectives", collectives_table(view)))
    if len(view.nodes) <= FOLDED:
        parts.append(_folded(f"all {len(view.nodes)} nodes", nodes_table(view)))
    return "<div>" + "".join(parts) + "</div>"


def _text(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{_text(text)}</details>"
