"""The report's page: one HTML file with its data, style and code inside, which loads nothing."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from functools import lru_cache
from importlib.resources import files
from typing import Any

from fxshard.inspect.data import Subject
from fxshard.inspect.report.data import Parts, report_data

STYLES = ("vendor/uPlot.min.css", "vendor/tabulator_simple.min.css", "report.css")
LIBRARIES = {"vendor/dagre.min.js": "dagre", "vendor/uPlot.iife.min.js": "uPlot", "vendor/tabulator.min.js": "tabulator"}
"""Files of libraries, and the names of their licences, which the page has too."""
SCRIPTS = ("base.js", "tree.js", "graph.js", "picture.js", "node.js", "tables.js", "timeline.js", "memory.js", "overview.js", "main.js")
"""In this order: each uses those before it."""


def report_html(subject: Subject, parts: Parts | None = None) -> str:
    """The report of a plan or program as the text of one HTML page; equal arguments give equal text."""
    return page(report_data(subject, parts or Parts()))


def page(data: dict[str, Any]) -> str:
    """The page that shows ``data``, which is compressed in it."""
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 9, mtime=0)).decode()
    parts = {
        "TITLE": html.escape(data["title"]),
        "STYLE": "\n".join(map(_asset, STYLES)),
        "SCRIPT": "\n".join(f"<script>\n{text}\n</script>" for text in (*map(_library, LIBRARIES), *map(_asset, SCRIPTS))),
        "DATA": packed,
    }
    return re.sub("@@([A-Z]+)@@", lambda place: parts[place[1]], _asset("template.html"))


def _library(name: str) -> str:
    """A library below its licence."""
    licence = _asset(f"vendor/{LIBRARIES[name]}.LICENSE")
    return f"/*\n{LIBRARIES[name]}\n{licence}\n*/\n{_asset(name)}"


@lru_cache
def _asset(name: str) -> str:
    """The text of a file of ``static/``, without references to source maps, which a browser would look for."""
    text = files("fxshard.inspect.report").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not line.startswith(("//# sourceMappingURL=", "/*# sourceMappingURL="))]
    return "\n".join(kept)
