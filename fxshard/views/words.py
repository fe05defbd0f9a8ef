"""Times, names and layouts in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fxshard.byte_sizes import size_text
from fxshard.text_table import number_runs

NAMES_WIDTH = 160
"""Maximum characters of a list of names."""

_PLACEMENT = re.compile(r"[A-Z](?:\([^)]*\))?")


def cost_text(value: float, unit: str) -> str:
    """A cost as text: a time, or bytes that a rank sends."""
    return size_text(value) if unit == "bytes" else time_text(value)


def time_text(microseconds: float) -> str:
    """Four digits and a unit: ``10.75 us``, ``43.07 ms``."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= 0.99995 * factor:
            return f"{microseconds / factor:,.4g} {unit}"
    return f"{microseconds:.4g} us" if abs(microseconds) >= 1e-6 else "0 us"


def placements(layout: str) -> list[str]:
    """A layout's placements, one per axis: ``S(0)P`` -> ``["S(0)", "P"]``."""
    return _PLACEMENT.findall(layout)


def layout_words(layout: str, axes: Sequence[str]) -> str:
    """``S(0) on dp, S(1) on tp``; ``whole`` if it is replicated on every axis."""
    held: dict[str, list[str]] = {}
    for placement, axis in zip(placements(layout), axes, strict=False):
        if placement != "R":
            held.setdefault(placement, []).append(axis)
    return ", ".join(f"{placement} on {' and '.join(on)}" for placement, on in held.items()) or "whole"


def shape_text(shape: Sequence[int | str]) -> str:
    """``8x4``; ``batch x 4`` if sizes are not all numbers."""
    return ("x" if all(isinstance(size, int) for size in shape) else " x ").join(map(str, shape)) or "scalar"


def merged_names(names: Iterable[str]) -> list[str]:
    """``layers.0-2.wq`` for ``layers.0.wq``, ``layers.1.wq``, ``layers.2.wq``: merges names that differ in one number."""
    return [name for name, _ in merged_names_with_counts(names)]


def merged_names_with_counts(names: Iterable[str]) -> list[tuple[str, int]]:
    """As ``merged_names``, with the number of names that each merged name replaces."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        head, number, tail = _split(name)
        found.setdefault((head, tail), []).append(number)
    texts = (head if numbers[0] < 0 else f"{head}{','.join(number_runs(numbers))}{tail}" for (head, tail), numbers in found.items())
    return list(zip(texts, map(len, found.values()), strict=True))


def _split(name: str) -> tuple[str, int, str]:
    """(text before the first part of a dotted name that is a number, the number, text after it); without one (name, -1, "")."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return name, -1, ""
    return ".".join([*parts[:at], ""]), int(parts[at]), ".".join(["", *parts[at + 1 :]]) if parts[at + 1 :] else ""


def pattern(name: str) -> str:
    """The name with ``*`` for the parts that are numbers: equal for modules that are alike."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def alike(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers, and then those of siblings, as one: ``layers.0-31.attention.wq, wk, wv``."""
    families: dict[str, list[str]] = {}
    for name in merged_names(dict.fromkeys(names)):
        parent, _, last = name.rpartition(".")
        families.setdefault(parent, []).append(last)
    return [(f"{parent}." if parent else "") + ", ".join(found) for parent, found in families.items()]
