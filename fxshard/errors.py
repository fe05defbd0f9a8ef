"""Errors for people: what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CONTROLS = [*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text with control characters, which names from a file may hold and a terminal would obey, as ``\\x1b``."""
    return text.translate(_SHOWN)


class FxshardError(Exception):
    """Base of every error that fxshard raises.

    Args:
        what: what is wrong, one sentence without a final period.
        where: the user's source line, node, parameter or file, if known.
        remedy: what the user can do.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(what, where, remedy)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.remedy:
            lines.append(f"  to do: {self.remedy}")
        return printable("\n".join(lines))


def closest(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the most similar of ``known``; empty if none is similar to ``name``."""
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def a_kind(value: object) -> str:
    """The type of a value in words: ``a list``, ``an Equal``, ``None``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def count_text(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class LayoutError(FxshardError):
    """An invalid layout: unknown axis, dim out of range, wrong length."""


class OptionError(FxshardError):
    """An unknown or ill-typed option."""


class TraceError(FxshardError):
    """A model that cannot be traced to one graph."""


class StaticDimError(TraceError):
    """A model that works for one size only of a dim that should be dynamic; ``dim`` is the dim's name."""

    dim = ""


class RuleError(FxshardError):
    """An operator without a usable rule, or a rule that does not fit its operands."""


class ConstraintError(FxshardError):
    """A pin that matches nothing, or constraints that cannot hold together."""


class PlanError(FxshardError):
    """A plan that is for another model or mesh, or that is not legal."""


class SizesError(PlanError):
    """Sizes that a plan or a program for dynamic dims does not serve."""


class FileError(FxshardError):
    """A file that is damaged, foreign or of an unknown version."""


class RunError(FxshardError):
    """A failure while ranks run: a missing rank, ranks that disagree."""
