"""A cache of results for parts of a graph, keyed by identity: repeated layers of a model share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class IdentityCache:
    """``cache(key, objects, make)`` returns ``make()``, cached by the key and the identity of the objects.

    Objects are compared by identity, because comparing the specs of two nodes costs as much as the work to be saved.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Sequence[Any], Any]] = {}  # holds the objects, so that their ids are not reused

    def __call__(self, key: Hashable, objects: Sequence[Any], make: Callable[[], T]) -> T:
        place = key, tuple(map(id, objects))
        if place not in self._made:
            self._made[place] = objects, make()
        made: T = self._made[place][1]
        return made
