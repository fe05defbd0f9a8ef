"""``--parallel dp=fsdp,tp=auto`` and ``--mixed-precision bfloat16,float32``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxshard.errors import OptionError, closest

if TYPE_CHECKING:
    from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision


WORDS = ("ddp", "fsdp", "tp", "cp", "ep", "auto")
"""The words for one axis."""


def parse_words(text: str | None) -> dict[str, str] | None:
    """The word of each axis; whether there are such axes is checked with the mesh. Raises OptionError for other text."""
    if text is None:
        return None
    found: dict[str, str] = {}
    for part in text.split(","):
        axis, equals, word = (side.strip() for side in part.partition("="))
        if not (axis and equals and word) or axis in found:
            raise OptionError(f"cannot read --parallel {text!r} at {part!r}", remedy="write it like --parallel dp=fsdp,tp=auto")
        if word not in WORDS:
            what = f"{word!r} is not a word for an axis{closest(word, WORDS)}"
            remedy = f"write one of {', '.join(WORDS)} (docs/parallel-styles.md); what else an axis can be for, Python says: parallel="
            raise OptionError(what, where=f"--parallel {text}", remedy=remedy)
        found[axis] = word
    return found


def parse_precision(text: str | None, gathers: str | None) -> MixedPrecision | None:
    """The dtypes to compute and to reduce in, and the form of gathers. Raises OptionError for other text."""
    if text is None:
        if gathers is not None:
            raise OptionError(f"--gathers {gathers} needs dtypes", remedy="add --mixed-precision bfloat16,float32")
        return None
    import torch

    from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision

    dtypes = [getattr(torch, name.strip(), None) for name in text.split(",")]
    if len(dtypes) > 2 or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise OptionError(f"cannot read --mixed-precision {text!r}", remedy="write it like --mixed-precision bfloat16,float32")
    param, reduce = dtypes[0], dtypes[1] if len(dtypes) > 1 else None
    return MixedPrecision(param, reduce, gathers=gathers)  # type: ignore[arg-type]  # checked above, and by MixedPrecision
