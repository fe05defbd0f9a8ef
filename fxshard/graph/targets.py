"""Cached properties of node targets: torch's operators compute their hash and name in Python, which takes a tenth of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def kept(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """``ask``, cached per target. The key is the target's id; the cache holds the target, so that its id is not reused."""
    known: dict[int, tuple[Any, T]] = {}

    def answer(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, ask(target)
        return found[1]

    return answer


name_of = kept(str)
"""The name of an operator, such as ``aten.mm.default``; ``str`` of any other target."""

number_of = kept(id)
"""An id that is unique to the target for the life of the process: a dictionary key that is cheaper than the target."""
