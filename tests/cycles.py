"""An object that only a search for cycles frees."""

from __future__ import annotations

import weakref


class Node:
    itself: Node


def cycle() -> weakref.ref[Node]:
    """To an object that nothing but itself refers to."""
    node = Node()
    node.itself = node
    return weakref.ref(node)
