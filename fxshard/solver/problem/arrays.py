"""The arrays that the solver works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Made = TypeVar("Made")


def starts(sizes: Sequence[int] | IntArray) -> IntArray:
    """Where parts of these sizes begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def each(arrays: Iterable[FloatArray], make: Callable[[FloatArray], Made]) -> list[Made]:
    """What is made of each array, once for all places where it is the same one: layers repeat, so arrays do."""
    tables = list(arrays)
    made = {key: make(t) for key, t in {id(t): t for t in tables}.items()}
    return [made[id(t)] for t in tables]


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """The same function, which gives what it made before where it is asked of the very same objects; arrays must not change meanwhile."""
    known: dict[tuple[int, ...], tuple[tuple[Any, ...], Made]] = {}  # objects are kept: another may not get the id of one that is gone

    def answer(*given: Any) -> Made:
        key = tuple(map(id, given))
        found = known.get(key)
        if found is None:
            found = known[key] = given, make(*given)
        return found[1]

    return answer
