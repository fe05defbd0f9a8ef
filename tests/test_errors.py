"""Words in error messages."""

from __future__ import annotations

import fxshard
from fxshard.errors import a_kind


def test_articles() -> None:
    assert [a_kind(v) for v in (fxshard.Equal("w"), [], 1, None, fxshard.Pin("w", "R"))] == [
        "an Equal",
        "a list",
        "an int",
        "None",
        "a Pin",
    ]
