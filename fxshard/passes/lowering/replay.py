"""Records emitted calls, to emit them again on other operands: layers repeat, and with them their calls and redistributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Place:
    """Stands for a node by its number: first the operands, then the recorded nodes in order."""

    number: int


@dataclass(frozen=True)
class Recording:
    """``calls``: (target, args, kwargs, value, part of its turn) of each node in order; in these and in ``result``, a ``Place`` stands for
    each node.

    Earlier nodes that are not operands, such as an axis index, stay as they are.
    """

    calls: tuple[tuple[Any, Any, Any, Any, float], ...]
    result: Any

    @staticmethod
    def of(operands: Sequence[fx.Node], nodes: Sequence[fx.Node], result: Any) -> Recording:
        """Records ``nodes`` with ``operands`` as parameters."""
        places: dict[fx.Node, Place] = {}
        for node in (*operands, *nodes):
            places.setdefault(node, Place(len(places)))
        calls = tuple(
            (n.target, _with_places(n.args, places), _with_places(n.kwargs, places), n.meta["val"], n.meta["turn"] % 1) for n in nodes
        )
        return Recording(calls, _with_places(result, places))

    def replay(self, operands: Sequence[fx.Node], emit: Callable[[Any, Any, Any, Any, float], fx.Node]) -> Any:
        """The result on other operands; ``emit`` makes a node of a target, args, kwargs, value and part of its turn."""
        nodes = list(dict.fromkeys(operands))
        for target, args, kwargs, value, part in self.calls:
            nodes.append(emit(target, _with_nodes(args, nodes), _with_nodes(kwargs, nodes), value, part))
        return _with_nodes(self.result, nodes)


def _with_places(value: Any, places: Mapping[fx.Node, Place]) -> Any:
    """Replaces nodes by places. A container without nodes is returned itself, so that it is not traversed again."""
    if isinstance(value, fx.Node):
        return places.get(value, value)
    if isinstance(value, (tuple, list)):
        items = [_with_places(v, places) for v in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _Items(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        found = {k: _with_places(v, places) for k, v in value.items()}
        return found if any(found[k] is not v for k, v in value.items()) else value
    return value


class _Items(tuple[Any, ...]):
    """A tuple with places in it."""


def _with_nodes(value: Any, nodes: Sequence[fx.Node]) -> Any:
    kind = type(value)
    if kind is Place:
        return nodes[value.number]
    if kind is _Items:
        return tuple([_with_nodes(v, nodes) for v in value])
    if kind is list:
        return [_with_nodes(v, nodes) for v in value]
    if kind is dict:
        return {k: _with_nodes(v, nodes) for k, v in value.items()}
    return value
