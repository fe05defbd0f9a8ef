"""Words in error messages."""

from __future__ import annotations

import unicodedata

import fxshard
from fxshard.errors import FileError, a_kind, printable


def test_articles() -> None:
    assert [a_kind(v) for v in (fxshard.Equal("w"), [], 1, None, fxshard.Pin("w", "R"))] == [
        "an Equal",
        "a list",
        "an int",
        "None",
        "a Pin",
    ]


def test_control_characters_are_shown() -> None:
    """Those of Unicode's categories Cc and of bidirectional text, but not ends of lines and tabs."""
    text = "".join(map(chr, range(0x2100)))
    shown = printable(text)
    assert all(unicodedata.category(char) != "Cc" or char in "\n\t" for char in shown)
    assert all(unicodedata.bidirectional(char) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI") for char in shown)
    assert printable("a\tb\n\x1b[31m é→") == "a\tb\n\\x1b[31m é→"
    assert str(FileError("x\x07", where="\x9b", remedy="\x7f")) == "x\\x07\n  where: \\x9b\n  to do: \\x7f"
