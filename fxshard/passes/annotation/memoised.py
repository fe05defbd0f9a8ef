"""A store of what was made for parts of a graph, so that it is made once for parts that are alike: the layers of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Alike:
    """``alike(key, objects, make)``: what ``make`` returned for this key and these very objects, kept from then on.

    Objects are told apart by identity: comparing the specs of two nodes costs as much as what is to be saved.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Sequence[Any], Any]] = {}  # objects are kept: another may not get the id of one that is gone

    def __call__(self, key: Hashable, objects: Sequence[Any], make: Callable[[], T]) -> T:
        place = key, tuple(map(id, objects))
        if place not in self._made:
            self._made[place] = objects, make()
        made: T = self._made[place][1]
        return made
