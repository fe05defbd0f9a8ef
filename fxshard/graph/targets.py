"""What is asked of the targets of nodes, kept for each: torch's operators hash and name themselves in Python, a tenth of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def kept(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """``ask``, asked once of each target: of the object itself, which is kept, so that no other gets its id."""
    known: dict[int, tuple[Any, T]] = {}

    def answer(target: Any) -> T:
        found = known.get(id(target))
        if found is None:
            found = known[id(target)] = target, ask(target)
        return found[1]

    return answer


name_of = kept(str)
"""The name of an operator, as in ``aten.mm.default``; of anything else what it says of itself."""

number_of = kept(id)
"""A number of its own, to be found by in the place of the target."""
