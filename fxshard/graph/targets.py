"""Cached properties of node targets: torch's operators compute their hash and name in Python, which takes a tenth of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def cached_by_target(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """``ask``, cached per target. The key is the target's id; the cache holds the target, so that its id is not reused."""
    known: dict[int, tuple[Any, T]] = {}

    def answer(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, ask(target)
        return found[1]

    return answer


name_of = cached_by_target(str)
"""The name of an operator, such as ``aten.mm.default``; ``str`` of any other target."""

target_id = cached_by_target(id)
"""An id that is unique to the target for the life of the process: a dictionary key that is cheaper than the target."""
