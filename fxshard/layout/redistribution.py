"""Moving a tensor from one layout to another by the cheapest steps.

A step changes the placement of one axis (``steps``). The cheapest sequence is a shortest path over plain layouts, under a price that
the caller gives (bytes by default); ties go to fewer steps, then to a fixed order, so that every rank finds the same path. Its edges
are single steps and sequences of steps through folded layouts (``detours``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import LayoutError
from fxshard.layout.detours import Edge, detours
from fxshard.layout.layouts import Layout, all_layouts, ceil_shape
from fxshard.layout.steps import (
    COLLECTIVES,
    LOCAL_STEPS,
    Extent,
    Price,
    Shapes,
    Step,
    bytes_price,
    exchange_shape,
    in_any_order,
    is_legal,
    sent_between,
    sent_bytes,
    single_step,
    step_price,
    walk,
)
from fxshard.mesh.mesh import Mesh

__all__ = [
    "COLLECTIVES",
    "LOCAL_STEPS",
    "Extent",
    "Price",
    "Shapes",
    "Step",
    "Table",
    "bytes_price",
    "exchange_shape",
    "is_legal",
    "path_bytes",
    "path_communication",
    "path_price",
    "sent_bytes",
    "single_step",
    "step_price",
    "steps",
    "table",
    "table_of",
    "walk",
]


def _neighbours(layout: Layout, ndim: int, ops: tuple[str, ...]) -> Iterator[tuple[Step, Layout]]:
    """Steps that are legal from ``layout``: an axis may change its dim only if no later axis cuts the same dim."""
    for axis, source in enumerate(layout):
        later = {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
        if isinstance(source, Shard) and source.dim in later:
            continue
        options: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim) if d not in later)]
        options += [Partial(op) for op in ops]
        for target in options:
            step = None if target == source else single_step(axis, source, target)
            if step is not None:
                yield step, layout.with_axis(axis, target)


def steps(source: Layout, target: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price = bytes_price) -> tuple[Step, ...]:
    """The cheapest steps that turn ``source`` into ``target`` for a tensor of global ``shape`` (``itemsize`` bytes an element); of several
    shapes those that are in the mean."""
    known = shape if isinstance(shape, Shapes) else tuple(shape)
    return table(known, itemsize, mesh, _partial_ops(source, target), price).steps(source, target)


def path_price(source: Layout, target: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price = bytes_price) -> float:
    """Price of the cheapest path from ``source`` to ``target``."""
    return price_along(source, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price)


def price_along(source: Layout, path: tuple[Step, ...], shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> float:
    """Price of a way from ``source``."""
    return sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walk(source, path))


def path_bytes(source: Layout, target: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price, axis: int) -> float:
    """Bytes that each rank sends on one axis along the steps of the cheapest path from ``source`` to ``target``."""
    paths = table(shape, itemsize, mesh, _partial_ops(source, target), price)
    return float(paths.sent(axis)[paths.index[source], paths.index[target]])


def path_communication(source: Layout, target: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> Any:
    """The part of ``path_price`` that is for collectives, as ``communication_along``."""
    return communication_along(source, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price)


def communication_along(source: Layout, path: tuple[Step, ...], shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> Any:
    """What the collectives on a way from ``source`` cost, local steps left out; of several shapes an array of each one's."""
    if isinstance(shape, Shapes):
        return np.array([communication_along(source, path, one, itemsize, mesh, price) for one in shape.shapes])
    return sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walk(source, path) if step.is_collective)


def joined_path(
    source: Layout, target: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price, joining: Price
) -> tuple[tuple[Step, ...], float]:
    """(steps, price) of the cheapest path where collectives join others: ``joining`` of one is saved. Nothing of paths with several: where
    one waits for another, it may not meet those that it could join."""
    return _joined(source, target, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price, joining)


def _joined(
    source: Layout, target: Layout, path: tuple[Step, ...], shape: Extent, itemsize: int, mesh: Mesh, price: Price, joining: Price
) -> tuple[tuple[Step, ...], float]:
    """``path``, the cheapest without joining, or the one step that leads there if that costs less."""
    near = _neighbours(source, len(shape), _partial_ops(source, target))
    candidates = [path, *((step,) for step, after in near if after == target and (step,) != path)]
    costs = [joined_price(source, one, shape, itemsize, mesh, price, joining) for one in candidates]
    return min(zip(candidates, costs, strict=True), key=lambda found: found[1])


def joined_price(source: Layout, path: tuple[Step, ...], shape: Extent, itemsize: int, mesh: Mesh, price: Price, joining: Price) -> float:
    """Price of a way from ``source``, less ``joining`` of its collective where it has but one."""
    walked = list(walk(source, path))
    whole = sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walked)
    sent = [(step, layout) for layout, step, _ in walked if step.is_collective]
    return whole - (step_price(*sent[0], shape, itemsize, mesh, joining) if len(sent) == 1 else 0.0)


def _partial_ops(*layouts: Layout) -> tuple[str, ...]:
    return tuple(sorted({"sum", *(p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial))}))


@dataclass(frozen=True)
class _Graph:
    """What tables of one number of dims have in common: ``layouts`` (the plain ones first), single steps (``edges``) between them,
    and sequences of them (``ways``: from, to, indexes of edges)."""

    layouts: tuple[Layout, ...]
    count: int
    edges: tuple[tuple[int, Step, int], ...]
    ways: tuple[tuple[int, int, tuple[int, ...]], ...]


@lru_cache(maxsize=64)
def _graph(ndim: int, axes: int, ops: tuple[str, ...]) -> _Graph:
    plain = all_layouts(ndim, axes, ops)
    known = [layout for layout in plain if in_any_order(layout)]
    single: list[tuple[Edge, ...]] = [
        ((layout, step, after),) for layout in known for step, after in _neighbours(layout, ndim, ops) if in_any_order(after)
    ]
    ways = [*single, *detours(known, ndim)]
    edges = list(dict.fromkeys(itertools.chain.from_iterable(ways)))
    layouts = list(dict.fromkeys([*plain, *(layout for before, _, after in edges for layout in (before, after))]))
    place, number = ({one: k for k, one in enumerate(found)} for found in (layouts, edges))
    return _Graph(
        tuple(layouts),
        len(plain),
        tuple((place[before], step, place[after]) for before, step, after in edges),
        tuple((place[way[0][0]], place[way[-1][2]], tuple(number[edge] for edge in way)) for way in ways),
    )


def _edge_prices(graph: _Graph, shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> list[float]:
    """Price of each single step; of several shapes the mean."""
    if isinstance(shape, Shapes):
        each = [_edge_prices(graph, one, itemsize, mesh, price) for one in shape.shapes]
        return [shape.mean(prices) for prices in zip(*each, strict=True)]
    local = [ceil_shape(shape, layout, mesh.shape) for layout in graph.layouts]
    size = [math.prod(one) * itemsize for one in local]
    return [price(step, sent_between(step, local[i], local[j], itemsize, mesh.shape[step.axis]), size[j]) for i, step, j in graph.edges]


class Table:
    """Cheapest paths between all layouts of one tensor (Floyd-Warshall); ``prices[i, j]`` from layout i to layout j.

    Of a tensor of several shapes prices are means, and a path is one for all of them."""

    def __init__(self, shape: Extent, itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price) -> None:
        self._graph = graph = _graph(len(shape), mesh.ndim, ops)
        self.layouts = list(graph.layouts[: graph.count])
        self.tensor = shape, itemsize, mesh
        self._sent: dict[int, np.ndarray] = {}
        self._joined: dict[Price, np.ndarray] = {}
        self._price = price
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        prices = _edge_prices(graph, shape, itemsize, mesh, price)
        weights, hops = np.full((graph.count,) * 2, np.inf), np.zeros((graph.count,) * 2)
        np.fill_diagonal(weights, 0.0)
        self._direct: dict[tuple[int, int], tuple[int, ...]] = {}
        for i, j, way in graph.ways:
            total = prices[way[0]] if len(way) == 1 else sum(prices[k] for k in way)
            if total < weights[i, j]:
                weights[i, j], hops[i, j], self._direct[i, j] = total, len(way) + (len(way) > 1) / 2, way
        self.prices, self.via = _all_pairs(weights, hops)

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest path; raises LayoutError where there is none."""
        i, j = self.index[source], self.index[target]
        if not np.isfinite(self.prices[i, j]):
            mixed = source if not in_any_order(source) else target
            remedy = "leave one kind pending; only sums and means may be pending together"
            raise LayoutError(
                f"{mixed} holds pending reductions whose order would matter: nothing leads from {source} to {target}", remedy=remedy
            )
        return tuple(step for a, b in itertools.pairwise(self.path(i, j)) for step in self.direct(a, b))

    def direct(self, i: int, j: int) -> tuple[Step, ...]:
        """The steps of a path that passes through no other plain layout (``via[i, j]`` is negative)."""
        return tuple(self._graph.edges[k][1] for k in self._direct[i, j])

    def sent(self, axis: int) -> np.ndarray:
        """(layouts, layouts) bytes that a rank sends on one axis along each path; 0 where there is none."""
        if axis not in self._sent:
            found = np.full(self.prices.shape, -1.0)
            for i, j in np.ndindex(*found.shape):
                self._fill(found, axis, i, j)
            self._sent[axis] = found
        return self._sent[axis]

    def _fill(self, found: np.ndarray, axis: int, i: int, j: int) -> float:
        if found[i, j] < 0:
            middle = self.via[i, j]
            if middle >= 0:
                found[i, j] = self._fill(found, axis, i, middle) + self._fill(found, axis, middle, j)
            else:
                one = self.direct(i, j) if i != j and np.isfinite(self.prices[i, j]) else ()
                found[i, j] = sum(self._bytes(step, at) for at, step, _ in walk(self.layouts[i], one) if step.axis == axis)
        return float(found[i, j])

    def _bytes(self, step: Step, layout: Layout) -> float:
        shape, itemsize, mesh = self.tensor
        if isinstance(shape, Shapes):
            return shape.mean([sent_bytes(step, layout, one, itemsize, mesh) for one in shape.shapes])
        return sent_bytes(step, layout, shape, itemsize, mesh)

    @cached_property
    def communication(self) -> np.ndarray:
        """(layouts, layouts) what the collectives along each path cost, its local steps left out; 0 where there is none. Of several shapes
        one such array each, behind each other."""
        shape = self.tensor[0]
        return np.stack([self._communication(one) for one in shape.shapes]) if isinstance(shape, Shapes) else self._communication(shape)

    def _communication(self, shape: tuple[int, ...]) -> np.ndarray:
        found, (_, itemsize, mesh) = np.zeros(self.prices.shape), self.tensor
        for (i, source), (j, target) in itertools.product(enumerate(self.layouts), repeat=2):
            if i != j and np.isfinite(self.prices[i, j]):
                found[i, j] = communication_along(source, self.steps(source, target), shape, itemsize, mesh, self._price)
        return found

    def joined(self, joining: Price) -> np.ndarray:
        """(layouts, layouts) prices where collectives join others, as of ``joined_path``."""
        if joining not in self._joined:
            found = self.prices.copy()
            for (i, source), (j, target) in itertools.product(enumerate(self.layouts), repeat=2):
                if i != j and np.isfinite(self.prices[i, j]):
                    found[i, j] = _joined(source, target, self.steps(source, target), *self.tensor, self._price, joining)[1]
            self._joined[joining] = found
        return self._joined[joining]

    def path(self, i: int, j: int) -> list[int]:
        middle = self.via[i, j]
        if middle < 0:
            return [i] if i == j else [i, j]
        return self.path(i, middle)[:-1] + self.path(middle, j)


TIE = 1e-7
"""Added to each step's price, so that of two equal paths the one with fewer steps is taken; half of it to a detour's, so that of as
many steps those on plain layouts are."""


@lru_cache(maxsize=4096)
def table(shape: Extent, itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price) -> Table:
    return Table(shape, itemsize, mesh, ops, price)


def table_of(layouts: Iterable[Layout], shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> Table:
    """The table in which all of these are."""
    return table(shape, itemsize, mesh, _partial_ops(*layouts), price)


def _all_pairs(weights: np.ndarray, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prices of the best paths and, for each pair, a node between them (-1: the direct way).

    ``hops``: steps of each direct way, and what tells detours apart. Paths are compared with ``TIE`` added to each step; the prices are
    without it.
    """
    prices = weights.copy()
    distance = weights + TIE * hops
    via = np.full(weights.shape, -1, dtype=np.int32)
    for k in range(len(weights)):
        through = distance[:, k, None] + distance[None, k, :]
        better = through < distance - 1e-12
        if better.any():
            np.copyto(distance, through, where=better)
            np.copyto(prices, prices[:, k, None] + prices[None, k, :], where=better)
            via[better] = k
    return prices, via
