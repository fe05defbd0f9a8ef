"""What was emitted into a local graph once, emitted again on other operands: layers repeat, and so do the calls and moves in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Place:
    """Stands for a node: the operands are numbered first, then what was emitted, in order."""

    number: int


@dataclass(frozen=True)
class Emitted:
    """``calls``: (target, arguments, keywords, value) of each node in order, nodes in arguments and in ``result`` as places.

    Nodes that were there before and are no operands, such as the place of a rank, stay as they are.
    """

    calls: tuple[tuple[Any, Any, Any, Any], ...]
    result: Any

    @staticmethod
    def of(operands: Sequence[fx.Node], nodes: Sequence[fx.Node], result: Any) -> Emitted:
        """What ``nodes`` are when ``operands`` are left open."""
        places: dict[fx.Node, Place] = {}
        for node in (*operands, *nodes):
            places.setdefault(node, Place(len(places)))
        calls = tuple((n.target, _opened(n.args, places), _opened(n.kwargs, places), n.meta["val"]) for n in nodes)
        return Emitted(calls, _opened(result, places))

    def again(self, operands: Sequence[fx.Node], emit: Callable[[Any, Any, Any, Any], fx.Node]) -> Any:
        """The result on other operands; ``emit`` makes a node of a target, arguments, keywords and its value."""
        nodes = list(dict.fromkeys(operands))
        for target, args, kwargs, value in self.calls:
            nodes.append(emit(target, _filled(args, nodes), _filled(kwargs, nodes), value))
        return _filled(self.result, nodes)


def _opened(value: Any, places: Mapping[fx.Node, Place]) -> Any:
    """Nodes as places; what holds none is itself, so that it need not be gone through again."""
    if isinstance(value, fx.Node):
        return places.get(value, value)
    if isinstance(value, (tuple, list)):
        items = [_opened(v, places) for v in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _Items(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        found = {k: _opened(v, places) for k, v in value.items()}
        return found if any(found[k] is not v for k, v in value.items()) else value
    return value


class _Items(tuple[Any, ...]):
    """A tuple with places in it."""


def _filled(value: Any, nodes: Sequence[fx.Node]) -> Any:
    kind = type(value)
    if kind is Place:
        return nodes[value.number]
    if kind is _Items:
        return tuple([_filled(v, nodes) for v in value])
    if kind is list:
        return [_filled(v, nodes) for v in value]
    if kind is dict:
        return {k: _filled(v, nodes) for k, v in value.items()}
    return value
