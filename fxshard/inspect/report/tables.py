"""Numbered tables of what repeats in a report: names, shapes, layouts. The data refers to their entries by index."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Table(Generic[T]):
    """Distinct entries in the order of their first use."""

    def __init__(self) -> None:
        self._index: dict[T, int] = {}

    def __call__(self, entry: T) -> int:
        """The index of an entry."""
        return self._index.setdefault(entry, len(self._index))

    @property
    def entries(self) -> list[T]:
        return list(self._index)
