"""The layouts that values have in eager execution because of the layouts that a model names: those that follow without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from fxshard.graph.planning_graph import ancestors, operands, producer
from fxshard.strategies import call_of, outputs_from

Placements = tuple[Placement, ...]


def followed(
    node: fx.Node, named: Mapping[fx.Node, Placements], is_dtensor: Callable[[fx.Node], bool], is_sharded: Callable[[fx.Node], bool]
) -> Placements | None:
    """The placements of ``node``, computed from values of ``named`` placements; None if they are unknown.

    An operator gives the layout in which eager DTensor has its result if it can read these values as they are in one way only. What else
    it reads must be scalars and vectors, as the weight of a norm, that no sharded parameter decides (``is_sharded``): a matrix may be
    sharded, and eager DTensor might move either.
    """
    found: dict[fx.Node, tuple[Placements, ...] | None] = {one: (placements,) for one, placements in named.items()}
    before = ancestors([node])

    def known(value: fx.Node) -> Placements | None:
        source, index = producer(value)
        outputs = found.get(source)
        return None if outputs is None else outputs[index]

    for one in node.graph.nodes:
        if one in before and one not in found and one.op == "call_function" and one is producer(one)[0] and is_dtensor(one):
            read = operands(one)
            given = [known(value) for value in read]
            free = [value for value, placements in zip(read, given, strict=True) if placements is None]
            if len(free) < len(read) and not any(is_dtensor(v) or is_sharded(v) or v.meta["val"].dim() > 1 for v in free):
                found[one] = _outputs(one, given)
    return known(node)


def _outputs(node: fx.Node, given: list[Placements | None]) -> tuple[Placements, ...] | None:
    """The placements of each output of ``node`` if its operands have those that are ``given``."""
    axes = {len(placements) for placements in given if placements is not None}
    if len(axes) != 1:
        return None
    call = call_of(node)
    by_axis = [outputs_from(call, [None if p is None else p[axis] for p in given]) for axis in range(axes.pop())]
    known = [outputs for outputs in by_axis if outputs is not None]
    return tuple(zip(*known, strict=True)) if len(known) == len(by_axis) else None
