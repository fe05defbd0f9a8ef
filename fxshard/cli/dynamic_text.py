"""Reads dynamic dims and sizes from the command line: ``args[0]:0=batch,1=seq``, ``batch=4,seq=8192``, ``batch=4*3; batch=64*1``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fxshard.errors import OptionError, closest

EXAMPLE_SIZES = "--example-sizes"
_DIM = re.compile(r"(\d+)=([A-Za-z_]\w*)")
_SIZE = re.compile(r"([A-Za-z_]\w*)=(\d+)")


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, str]] | None:
    """``["args[0]:0=batch,1=seq"]`` -> ``{"args[0]": {0: "batch", 1: "seq"}}``; None without texts; raises OptionError.

    One text may name several inputs, separated by ``;``.
    """
    found: dict[str, dict[int, str]] = {}
    for text in (part for one in texts for part in one.split(";") if part.strip()):
        path, colon, dims = text.strip().rpartition(":")
        pairs = [_DIM.fullmatch(part.strip()) for part in dims.split(",")]
        if not colon or not path or not all(pairs):
            raise OptionError(f"cannot read {text!r}", where="--dynamic", remedy="write an input and its dims: args[0]:0=batch,1=seq")
        found.setdefault(path, {}).update({int(pair[1]): pair[2] for pair in pairs if pair})
    return found or None


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


def check_named(sizes: Sequence[Mapping[str, int]], dynamic: Mapping[str, Mapping[int, str]] | None) -> None:
    """Raises OptionError, before planning, for sizes of dims that ``--dynamic`` does not name; without that option, any name passes."""
    names = sorted({name for dims in (dynamic or {}).values() for name in dims.values()})
    unknown = next((name for one in sizes for name in one if names and name not in names), None)
    if unknown is not None:
        what = f"no dynamic dim is called {unknown!r}{closest(unknown, names)}"
        raise OptionError(what, where="--at", remedy=f"name it in --dynamic, or give sizes of {', '.join(names)}")
