"""Dynamic dims and sizes as the command line writes them: ``args[0]:0=batch<=64,1=seq``, ``batch=4,seq=8192``, ``batch=4*3; batch=64``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxshard.errors import OptionError, closest

if TYPE_CHECKING:
    from torch.export import Dim

EXAMPLE_SIZES = "--example-sizes"
DYNAMIC_REMEDY = "write an input and its dims, with their range if they have one: args[0]:0=batch,1=seq or args[0]:0=2<=batch<=64"
_DIM = re.compile(r"(\d+)\s*=\s*(?:(\d+)\s*<=\s*)?([A-Za-z_]\w*)(?:\s*<=\s*(\d+))?")
_SIZE = re.compile(r"([A-Za-z_]\w*)=(\d+)")


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, str | Dim]] | None:
    """``["args[0]:0=batch<=64,1=seq"]`` -> ``{"args[0]": {0: Dim("batch", max=64), 1: "seq"}}``, None for no texts; raises OptionError.

    One text may name several inputs, separated by ``;``. A range (``2<=batch``, ``2<=batch<=64``) applies to all dims of that name.
    """
    found: dict[str, dict[int, str | Dim]] = {}
    for text in (part for one in texts for part in one.split(";") if part.strip()):
        path, colon, dims = text.strip().rpartition(":")
        pairs = [_DIM.fullmatch(part.strip()) for part in dims.split(",")]
        if not colon or not path or not all(pairs):
            raise OptionError(f"cannot read {text!r}", where="--dynamic", remedy=DYNAMIC_REMEDY)
        found.setdefault(path, {}).update({int(pair[1]): _dim(*pair.group(3, 2, 4)) for pair in pairs if pair})
    return found or None


def _dim(name: str, least: str | None, most: str | None) -> str | Dim:
    if least is None and most is None:
        return name
    low, high = int(least or 1), None if most is None else int(most)
    if high is not None and high <= low:
        what = f"the range of {name} goes from {low} to {high}"
        raise OptionError(what, where="--dynamic", remedy="give a larger maximum, or leave the dim static")
    from torch.export import Dim  # texts without ranges are read without torch

    return Dim(name, min=low, max=high)


def parse_example_sizes(text: str | None) -> list[tuple[dict[str, int], float] | dict[str, int]] | None:
    """``"batch=8,seq=2048*3; batch=64,seq=1*1"`` -> ``[({"batch": 8, "seq": 2048}, 3.0), ...]``; without weights, just the sizes.

    Raises OptionError.
    """
    if text is None:
        return None
    found: list[tuple[dict[str, int], float] | dict[str, int]] = []
    for part in text.split(";"):
        sizes, star, weight = part.partition("*")
        named = parse_sizes(sizes, EXAMPLE_SIZES)
        if not star:
            found.append(named)
            continue
        try:
            found.append((named, float(weight)))
        except ValueError as error:
            raise OptionError(f"cannot read the weight in {part.strip()!r}", where=EXAMPLE_SIZES, remedy="write it batch=8*0.7") from error
    return found


def parse_sizes(text: str, where: str = "--at") -> dict[str, int]:
    """``"batch=4,seq=8192"`` -> ``{"batch": 4, "seq": 8192}``; raises OptionError."""
    pairs = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(pairs):
        raise OptionError(f"cannot read {text!r}", where=where, remedy="write names of dynamic dims and their sizes: batch=4,seq=8192")
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def check_named(sizes: Sequence[Mapping[str, int]], dynamic: Mapping[str, Mapping[int, str | Dim]] | None) -> None:
    """Raises OptionError for sizes of dims that ``--dynamic`` does not name; to be called before anything is planned.

    Without ``--dynamic`` it accepts all names, since the example inputs may have dims that are marked as dynamic.
    """
    names = sorted({one if isinstance(one, str) else one.__name__ for dims in (dynamic or {}).values() for one in dims.values()})
    unknown = next((name for one in sizes for name in one if names and name not in names), None)
    if unknown is not None:
        what = f"no dynamic dim is called {unknown!r}{closest(unknown, names)}"
        raise OptionError(what, where="--at", remedy=f"name it in --dynamic, or give sizes of {', '.join(names)}")
