"""An object that only Python's cycle collector frees."""

from __future__ import annotations

import weakref


class Node:
    itself: Node


def cycle() -> weakref.ref[Node]:
    """A weak reference to an object that only refers to itself."""
    node = Node()
    node.itself = node
    return weakref.ref(node)
