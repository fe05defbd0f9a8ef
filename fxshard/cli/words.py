"""``--parallel dp=fsdp,tp=auto``."""

from __future__ import annotations

from fxshard.errors import OptionError


def parse_words(text: str | None) -> dict[str, str] | None:
    """The word of each axis; whether there are such axes and words is checked with the mesh. Raises OptionError for other text."""
    if text is None:
        return None
    found: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, word = (side.strip() for side in part.partition("="))
        if not (axis and equals and word) or axis in found:
            raise OptionError(f"cannot read --parallel {text!r} at {part!r}", remedy="write it like --parallel dp=fsdp,tp=auto")
        found[axis] = word
    return found
