"""Tables that fit a terminal: long cells are shortened in the middle, and a column with equal cells becomes a line above the table.

Libraries wrap long cells over several lines, or cut their ends, in which names differ: decision 0043.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from textwrap import TextWrapper

from tabulate import tabulate

from fxshard.errors import printable

WIDTH = 110
"""Characters in a line."""

MAX_CELL = 2_000
"""Characters of a cell where nothing else limits it: a table is as wide as its longest cell, and has as many lines as a file says."""

GAP, MARK = 2, "..."
PADDING = 2
"""Characters that tabulate leaves beside a header."""

READABLE = 20
"""Characters that a column in ``YIELDING`` keeps until the other columns are shortened too."""

FILES = ("line", "source")
"""Headers of columns that hold source lines, ``folder/file.py:70: code``; their end matters least."""

YIELDING = ("operator", "reads", "gives", "for", "reason", "where", *FILES)
"""Headers of columns that are shortened before others."""

ENDING = ("where", *FILES)
"""Headers of columns that are shortened at their end."""

NUMBERS = ("bytes", "each", "together", "count", "us", "share", "time")
"""Headers of columns that are aligned to the right."""


def fitted(rows: Sequence[Sequence[object]], headers: Sequence[str], width: int = WIDTH, same: bool = True) -> str:
    """Rows as a table of at most ``width`` characters.

    ``same``: leaves out columns that are empty, and, if there are several rows, columns with equal cells; a line above the table gives
    the values of the latter.
    """
    texts = [[_cell(header, value) for header, value in zip(headers, row, strict=True)] for row in rows]
    kept, said = _telling(texts, headers) if same else (list(range(len(headers))), "")
    widths = [max((len(row[k]) for row in texts), default=0) for k in kept]
    caps = _caps(widths, [headers[k] for k in kept], width - GAP * (len(kept) - 1))
    cells = [[_short(row[k], cap, headers[k]) for k, cap in zip(kept, caps, strict=True)] for row in texts]
    align = ["right" if headers[k] in NUMBERS else "left" for k in kept]
    table = tabulate(cells, headers=[headers[k] for k in kept], disable_numparse=True, colalign=align if cells else None)
    return printable(f"{said}\n{table}" if said else table)


def shorten(text: str, length: int) -> str:
    """The text, or its beginning and end around ``...`` where it is longer."""
    if len(text) <= length:
        return text
    left = max(length - len(MARK), 2)
    return f"{text[: (left + 1) // 2]}{MARK}{text[len(text) - left // 2 :]}"


def listed(names: Iterable[str], width: int = WIDTH) -> str:
    """As many names as fit, ``a, b, c``, and the number of those left out."""
    found = list(names)
    for count in range(len(found), 0, -1):
        more = f" and {len(found) - count} more" if count < len(found) else ""
        text = ", ".join(found[:count]) + more
        if len(text) <= width:
            return text
    return shorten(", ".join(found), width)


def number_runs(numbers: Iterable[int]) -> list[str]:
    """``["0-30", "32"]``."""
    order = enumerate(sorted(set(numbers)))
    runs = [[number for _, number in run] for _, run in itertools.groupby(order, lambda pair: pair[1] - pair[0])]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def labelled(rows: Iterable[tuple[str, str]], width: int = WIDTH) -> str:
    """A line for each (label, text), with the texts aligned; long texts are wrapped."""
    found = list(rows)
    indent = GAP + max((len(label) for label, _ in found), default=0)
    wrap = TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    lines = ["\n".join(wrap.wrap(_UNIT.sub("\N{NO-BREAK SPACE}", f"{label:<{indent}}{text}"))) for label, text in found]
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


_UNIT = re.compile(r"(?<=\d) (?=([kMGT]?B|bytes|us|ms|s)\b)")
"""The space between a number and its unit, at which no line is broken."""


_PLACE = re.compile(r"[^:]*:\d+")
"""File and number of a source line."""


def in_short(line: str) -> str:
    """A source line with only the last folder of its file's path."""
    return re.sub(r"^(?:.*?[/\\])?((?:[^/\\:]+[/\\])?[^/\\:]+:\d+)", r"\1", line)


def _cell(header: str, value: object) -> str:
    text = "" if value is None else str(value)
    return shorten(in_short(text) if header in FILES else text, MAX_CELL)


def _telling(texts: Sequence[Sequence[str]], headers: Sequence[str]) -> tuple[list[int], str]:
    """(the first column and those whose cells differ, a line with the values of the others)."""
    same = [k for k in range(1, len(headers)) if all(row[k] == texts[0][k] for row in texts) and (len(texts) > 1 or not texts[0][k])]
    said = [f"{headers[k]} {texts[0][k]}" for k in same if texts[0][k]]
    return [k for k in range(len(headers)) if k not in same], f"all: {', '.join(said)}" if said else ""


def _caps(widths: Sequence[int], headers: Sequence[str], room: int) -> list[int]:
    """The widths, reduced until they fit into ``room``: always the widest columns, first those in ``YIELDING``; never below a header."""
    least = [len(header) + PADDING for header in headers]
    caps = [max(pair) for pair in zip(widths, least, strict=True)]
    yielding = [k for k, header in enumerate(headers) if header in YIELDING]
    for enough, places in ((READABLE, yielding), (0, range(len(caps)))):
        while sum(caps) > room and (wide := [k for k in places if caps[k] > max(enough, least[k])]):
            widest = max(caps[k] for k in wide)
            for k in wide:
                caps[k] = min(caps[k], widest - 1)
    return caps


def _short(text: str, length: int, header: str) -> str:
    if header in FILES:
        return _short_line(text, length)
    if header in ENDING and len(text) > length:
        return text[: length - len(MARK)] + MARK
    return shorten(text, length)


def _short_line(text: str, length: int) -> str:
    """A source line cut at its end; if not even file and number fit, these are cut at their beginning: ``...odel.py:70``."""
    place = _PLACE.match(text)
    if len(text) <= length:
        return text
    if place is not None and len(place[0]) + len(MARK) > length:
        return place[0] if len(place[0]) <= length else MARK + place[0][len(MARK) - length :]
    return text[: length - len(MARK)] + MARK
