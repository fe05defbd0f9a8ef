"""Fixed slices of long parametrizations: the suite runs part of a product, ``make slow`` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonal(*lists: Sequence[Any]) -> list[Any]:
    """The product of ``lists``, for ``parametrize``. The suite runs a diagonal of it, in which each value of each list occurs."""
    longest = max(map(len, lists))
    kept = {tuple(i % len(values) for values in lists) for i in range(longest)}
    every = itertools.product(*(range(len(values)) for values in lists))
    return [_case([values[i] for values, i in zip(lists, place, strict=True)], place in kept) for place in every]


def _case(values: Sequence[Any], kept: bool) -> Any:
    name = "-".join(getattr(value, "__name__", str(value)) for value in values)
    return pytest.param(*values, id=name, marks=[] if kept else [pytest.mark.slow])


def few(count: int, cases: Sequence[Any]) -> list[Any]:
    """``cases`` of one argument, for ``parametrize``. The suite runs ``count`` of them, spread over the list; the rest is slow."""
    kept = {i * len(cases) // count for i in range(count)}
    return [_case([case], i in kept) for i, case in enumerate(cases)]
