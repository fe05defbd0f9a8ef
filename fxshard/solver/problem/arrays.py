"""Array types of the solver, and helpers that process an array shared by repeated layers only once."""

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
    """(n + 1,) the offsets of n consecutive parts of these sizes, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def each(arrays: Iterable[FloatArray], make: Callable[[FloatArray], Made]) -> list[Made]:
    """`make` of each array; computed once per distinct array object, since repeated layers share arrays."""
    tables = list(arrays)
    made = {key: make(t) for key, t in {id(t): t for t in tables}.items()}
    return [made[id(t)] for t in tables]


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """`make`, memoised by the identity of its arguments; arrays passed to it must not change."""
    known: dict[tuple[int, ...], tuple[tuple[Any, ...], Made]] = {}  # holds the arguments, so that no id is reused

    def answer(*given: Any) -> Made:
        key = tuple(map(id, given))
        found = known.get(key)
        if found is None:
            found = known[key] = given, make(*given)
        return found[1]

    return answer
