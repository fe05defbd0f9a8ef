"""The cheapest redistribution from one layout to another.

A step changes the placement of one axis (``steps``). The cheapest sequence is a shortest path over plain layouts, under a price that
the caller gives (bytes by default). Edges are single steps and paths through folded layouts (``folded_paths``). Ties go to fewer steps,
then to a fixed order, so that every rank finds the same path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import LayoutError
from fxshard.layout.folded_paths import Edge, folded_paths
from fxshard.layout.layouts import Layout, all_layouts, canonical, ceil_shape, sharding_axes
from fxshard.layout.shortest_paths import DIRECT, all_pairs, along
from fxshard.layout.steps import (
    COLLECTIVES,
    LOCAL_STEPS,
    AnyShape,
    Price,
    Step,
    WeightedShapes,
    bytes_price,
    exchange_shape,
    is_legal,
    moved_between,
    moves_rows,
    reductions_commute,
    sent_bytes,
    single_step,
    step_price,
    walk,
    without_copies,
)
from fxshard.mesh.mesh import Mesh

__all__ = [
    "COLLECTIVES",
    "LOCAL_STEPS",
    "AnyShape",
    "Price",
    "WeightedShapes",
    "Step",
    "PathTable",
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
    "path_table",
    "path_table_for",
    "walk",
]


def _neighbours(
    layout: Layout, ndim: int, axes: Iterable[int], ops: tuple[str, ...], packed: tuple[PackedShard, ...] = ()
) -> Iterator[tuple[Step, Layout]]:
    """Steps of one of ``axes`` between plain layouts from ``layout``: an axis may leave or enter a dim only if no later axis shards that
    dim. ``packed``: ways to pack dims; an axis may enter a packed dim only alone."""
    closed = {p.dim for p in layout.packed}
    for axis in axes:
        source = layout[axis]
        later = {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
        if isinstance(source, Shard) and source.dim in later:
            continue
        options: list[Placement] = [Replicate(), *(Shard(d) for d in range(ndim) if d not in later and d not in closed)]
        options += [Partial(op) for op in ops]
        options += [p for p in packed if not layout.held_on(p.dim)]
        for target in options:
            step = None if target == source else single_step(axis, source, target)
            if step is not None and not moves_rows(step, layout):
                yield step, layout.with_axis(axis, target)


def steps(source: Layout, target: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price = bytes_price) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``target`` for a tensor of global ``shape`` (``itemsize`` bytes per element); for several
    shapes, the cheapest in the weighted mean. None for axes of one rank."""
    known = shape if isinstance(shape, WeightedShapes) else tuple(shape)
    source, target = (canonical(layout, mesh.shape) for layout in (source, target))
    return path_table_for((source, target), known, itemsize, mesh, price).steps(source, target)


def path_price(source: Layout, target: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price = bytes_price) -> float:
    """Price of the cheapest path from ``source`` to ``target``."""
    return price_along(source, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price)


def price_along(source: Layout, path: tuple[Step, ...], shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> float:
    """Price of the steps of ``path``, from ``source``."""
    return sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walk(source, path))


@lru_cache(maxsize=65536)
def path_bytes(source: Layout, target: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price, axis: int) -> float:
    """Bytes that each rank sends on one axis along the cheapest path from ``source`` to ``target``; 0 if there is no path."""
    source, target = (canonical(layout, mesh.shape) for layout in (source, target))
    paths = path_table_for((source, target), shape, itemsize, mesh, price)
    if not np.isfinite(paths.prices[paths.index[source], paths.index[target]]):
        return 0.0

    def on_axis(step: Step, sent: int, written: int) -> float:
        return float(sent) if step.axis == axis else 0.0

    return price_along(source, paths.steps(source, target), shape, itemsize, mesh, on_axis)


def path_communication(source: Layout, target: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> Any:
    """The collectives' part of ``path_price``; see ``communication_along``."""
    return communication_along(source, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price)


def communication_along(source: Layout, path: tuple[Step, ...], shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> Any:
    """Price of the collectives of ``path``, from ``source``, without local steps and copies; for several shapes, one entry each."""
    if isinstance(shape, WeightedShapes):
        return np.array([communication_along(source, path, one, itemsize, mesh, price) for one in shape.shapes])
    sending = without_copies(price)
    return sum(step_price(step, layout, shape, itemsize, mesh, sending) for layout, step, _ in walk(source, path) if step.is_collective)


def bucketed_path(
    source: Layout, target: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price, saving: Price
) -> tuple[tuple[Step, ...], float]:
    """(steps, price) of the cheapest path if its collective joins a bucket, which lowers the price by ``saving``. Paths with several
    collectives save nothing: one that waits for another may come too late for its bucket."""
    return _bucketed(source, target, steps(source, target, shape, itemsize, mesh, price), shape, itemsize, mesh, price, saving)


def _bucketed(
    source: Layout, target: Layout, path: tuple[Step, ...], shape: AnyShape, itemsize: int, mesh: Mesh, price: Price, saving: Price
) -> tuple[tuple[Step, ...], float]:
    """The cheaper of ``path`` (the cheapest without saving) and the single step to ``target``, if there is one."""
    near = _neighbours(source, len(shape), sharding_axes(mesh.shape), _partial_ops(source, target), _packed(source, target))
    candidates = [path, *((step,) for step, after in near if after == target and (step,) != path)]
    costs = [bucketed_price(source, one, shape, itemsize, mesh, price, saving) for one in candidates]
    return min(zip(candidates, costs, strict=True), key=lambda found: found[1])


def bucketed_price(
    source: Layout, path: tuple[Step, ...], shape: AnyShape, itemsize: int, mesh: Mesh, price: Price, saving: Price
) -> float:
    """Price of ``path``, from ``source``, less the ``saving`` price of its collective if it has exactly one."""
    walked = list(walk(source, path))
    whole = sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walked)
    sent = [(step, layout) for layout, step, _ in walked if step.is_collective]
    return whole - (step_price(*sent[0], shape, itemsize, mesh, saving) if len(sent) == 1 else 0.0)


def _partial_ops(*layouts: Layout) -> tuple[str, ...]:
    return tuple(sorted({"sum", *(p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial))}))


def _packed(*layouts: Layout) -> tuple[PackedShard, ...]:
    """The ways in which some layouts pack dims, in a fixed order."""
    return tuple(sorted({p for layout in layouts for p in layout.packed}, key=lambda p: (p.dim, p.parts)))


@dataclass(frozen=True, eq=False)  # one a key of ``_graph``, compared by identity
class _Graph:
    """The part of a table that depends only on the number of dims: ``layouts`` (the first ``count`` are plain), single steps between them
    (``edges``), and paths between plain layouts (``paths``: from, to, indexes of edges)."""

    layouts: tuple[Layout, ...]
    count: int
    edges: tuple[tuple[int, Step, int], ...]
    paths: tuple[tuple[int, int, tuple[int, ...]], ...]


@lru_cache(maxsize=256)
def _graph(ndim: int, mesh_shape: tuple[int, ...], ops: tuple[str, ...], packed: tuple[PackedShard, ...] = ()) -> _Graph:
    """``mesh_shape``: all axes with several ranks are as good as one with two."""
    plain, axes = all_layouts(ndim, mesh_shape, ops, packed), sharding_axes(mesh_shape)
    known = [layout for layout in plain if reductions_commute(layout)]
    near = ((layout, step, after) for layout in known for step, after in _neighbours(layout, ndim, axes, ops, packed))
    single: list[tuple[Edge, ...]] = [(edge,) for edge in near if reductions_commute(edge[-1])]
    paths = [*single, *folded_paths([layout for layout in known if not layout.packed and not layout.expert_axes], ndim, axes)]
    edges = list(dict.fromkeys(itertools.chain.from_iterable(paths)))
    layouts = list(dict.fromkeys([*plain, *(layout for before, _, after in edges for layout in (before, after))]))
    place, number = ({one: k for k, one in enumerate(found)} for found in (layouts, edges))
    return _Graph(
        tuple(layouts),
        len(plain),
        tuple((place[before], step, place[after]) for before, step, after in edges),
        tuple((place[path[0][0]], place[path[-1][2]], tuple(number[edge] for edge in path)) for path in paths),
    )


def _edge_prices(graph: _Graph, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> list[float]:
    """Price of each single step, the weighted mean over several shapes."""
    if isinstance(shape, WeightedShapes):
        each = [_edge_prices(graph, one, itemsize, mesh, price) for one in shape.shapes]
        return [shape.mean(prices) for prices in zip(*each, strict=True)]
    return [price(*edge) for edge in _edge_bytes(graph, shape, itemsize, mesh.shape)]


@lru_cache(maxsize=1024)
def _edge_bytes(graph: _Graph, shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...]) -> list[tuple[Step, int, int]]:
    """(step, bytes that a rank sends, bytes that it writes beside that) of each single step, whatever they cost."""
    local = [ceil_shape(shape, layout, mesh) for layout in graph.layouts]
    return [(step, *moved_between(step, graph.layouts[i], local[i], local[j], itemsize, mesh[step.axis])) for i, step, j in graph.edges]


class PathTable:
    """Cheapest paths between all layouts of one tensor (Floyd-Warshall); ``prices[i, j]`` is that from layout i to layout j.

    A tensor of several shapes has the same path at all of them, and the weighted mean as its price."""

    def __init__(
        self, shape: AnyShape, itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price, packed: tuple[PackedShard, ...] = ()
    ) -> None:
        self._graph = graph = _graph(len(shape), tuple(min(ranks, 2) for ranks in mesh.shape), ops, packed)
        self.layouts = list(graph.layouts[: graph.count])
        self.tensor = shape, itemsize, mesh
        self._bucketed: dict[Price, np.ndarray] = {}
        self._price = price
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        self._edge_prices = prices = _edge_prices(graph, shape, itemsize, mesh, price)
        weights, hops = np.full((graph.count,) * 2, np.inf), np.zeros((graph.count,) * 2)
        np.fill_diagonal(weights, 0.0)
        self._direct: dict[tuple[int, int], tuple[int, ...]] = {}
        for i, j, path in graph.paths:
            total = prices[path[0]] if len(path) == 1 else sum(prices[k] for k in path)
            if total < weights[i, j]:
                weights[i, j], hops[i, j], self._direct[i, j] = total, len(path) + (len(path) > 1) / 2, path
        self.prices, self.via = all_pairs(weights, hops)

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest path; raises LayoutError if there is none."""
        i, j = self.index[source], self.index[target]
        if not np.isfinite(self.prices[i, j]):
            mixed = source if not reductions_commute(source) else target
            remedy = "leave one kind pending; only sums and means may be pending together"
            raise LayoutError(
                f"{mixed} holds pending reductions whose order would matter: no steps lead from {source} to {target}", remedy=remedy
            )
        return tuple(step for a, b in itertools.pairwise(self.path(i, j)) for step in self.direct(a, b))

    def between(self, figures: np.ndarray, layouts: Sequence[Layout]) -> np.ndarray:
        """(len(layouts), len(layouts)) the part of a table of ``figures`` between all layouts that is between some."""
        numbers = [self.index[layout] for layout in layouts]
        return figures[np.ix_(numbers, numbers)]

    def direct(self, i: int, j: int) -> tuple[Step, ...]:
        """The steps of a path through no other plain layout (``via[i, j]`` is negative)."""
        return tuple(self._graph.edges[k][1] for k in self._direct[i, j])

    @cached_property
    def communication(self) -> np.ndarray:
        """(layouts, layouts) price of the collectives along each path, without local steps and copies; 0 if there is no path. For several
        shapes (shapes, layouts, layouts)."""
        (shape, itemsize, mesh), sending = self.tensor, without_copies(self._price)
        if isinstance(shape, WeightedShapes):
            return np.stack([self._along(self._of_collectives(one, itemsize, mesh, sending)) for one in shape.shapes])
        return self._along(self._of_collectives(shape, itemsize, mesh, sending))

    def bucketed(self, saving: Price) -> np.ndarray:
        """(layouts, layouts) prices if collectives join buckets, as in ``bucketed_path``."""
        if saving not in self._bucketed:
            saved = self._of_collectives(*self.tensor, saving)
            collectives = self._along([float(step.is_collective) for _, step, _ in self._graph.edges])
            found = self.prices - np.where(collectives == 1, self._along(saved), 0.0)
            for k, (i, _, j) in enumerate(self._graph.edges):
                if i < self._graph.count and j < self._graph.count:
                    found[i, j] = min(found[i, j], self._edge_prices[k] - saved[k])
            self._bucketed[saving] = found
        return self._bucketed[saving]

    def _of_collectives(self, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> list[float]:
        """Price of each single step that is a collective, 0 for the others."""
        prices = _edge_prices(self._graph, shape, itemsize, mesh, price)
        return [one if step.is_collective else 0.0 for one, (_, step, _) in zip(prices, self._graph.edges, strict=True)]

    def _along(self, figures: Sequence[float] | np.ndarray) -> np.ndarray:
        """(layouts, layouts) sums of a figure of each single step along each path; 0 if there is no path."""
        each = np.zeros(self.prices.shape)
        for pair, path in self._direct.items():
            each[pair] = sum(figures[k] for k in path)
        direct = np.zeros(self.prices.shape, dtype=bool)
        direct[tuple(np.array(list(self._direct)).T)] = True
        return along(each, direct & (self.via == DIRECT), self.via, np.isfinite(self.prices))

    def path(self, i: int, j: int) -> list[int]:
        middle = self.via[i, j]
        if middle < 0:
            return [i] if i == j else [i, j]
        return self.path(i, middle)[:-1] + self.path(middle, j)


@lru_cache(maxsize=4096)
def path_table(
    shape: AnyShape, itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price, packed: tuple[PackedShard, ...] = ()
) -> PathTable:
    return PathTable(shape, itemsize, mesh, ops, price, packed)


def path_table_for(layouts: Iterable[Layout], shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> PathTable:
    """The table that contains all of these layouts."""
    known = tuple(layouts)
    return path_table(shape, itemsize, mesh, _partial_ops(*known), price, _packed(*known))
