"""Moving a tensor from one layout to another: the steps, and the bytes that each rank sends.

A step changes the placement of one axis. The cheapest sequence is a shortest path over layouts, under a price that the
caller gives (bytes by default); ties go to fewer steps, then to a fixed order, so that every rank finds the same path.
Shards of a dim over several axes are nested in mesh order, so only the innermost axis on a dim can change.
Bytes follow the ring forms of a buffer N on n ranks: all-reduce 2(n-1)/n N, all-gather and reduce-scatter (n-1)/n of
the whole, all-to-all (n-1)/n of the local buffer; all at ceil sizes, which is what a padded collective sends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout import Layout, all_layouts, ceil_shape, placement_str
from fxshard.mesh import Mesh

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
LOCAL_STEPS = ("slice", "to_partial")


@dataclass(frozen=True)
class Step:
    """One change of placement on one axis: ``source`` -> ``target`` (placements) on mesh axis ``axis`` (an index)."""

    kind: str
    axis: int
    source: Placement
    target: Placement

    @property
    def is_collective(self) -> bool:
        return self.kind in COLLECTIVES

    def describe(self, mesh: Mesh) -> str:
        return f"{self.kind}({mesh.axis_names[self.axis]}: {placement_str(self.source)}->{placement_str(self.target)})"


Price = Callable[[Step, int, int], float]
"""(step, bytes sent by a rank, bytes that a rank writes locally) -> price."""


def bytes_price(step: Step, sent: int, written: int) -> float:
    """Bytes sent; local steps are free."""
    return float(sent)


def single_step(axis: int, source: Placement, target: Placement) -> Step | None:
    """The step between two placements of one axis, None where it takes more than one."""
    if isinstance(source, Partial):
        if isinstance(target, Replicate):
            return Step("all_reduce", axis, source, target)
        if isinstance(target, Shard):
            return Step("reduce_scatter", axis, source, target)
    elif isinstance(source, Shard):
        if isinstance(target, Replicate):
            return Step("all_gather", axis, source, target)
        if isinstance(target, Shard):
            return Step("all_to_all", axis, source, target)
    elif isinstance(target, Shard):
        return Step("slice", axis, source, target)
    elif isinstance(target, Partial):
        return Step("to_partial", axis, source, target)
    return None


def is_legal(step: Step, layout: Layout) -> bool:
    """Whether ``step`` starts at ``layout``, is of its kind, and leaves alone the dims that later axes cut."""
    later = {p.dim for p in layout[step.axis + 1 :] if isinstance(p, Shard)}
    moved = {p.dim for p in (step.source, step.target) if isinstance(p, Shard)}
    return layout[step.axis] == step.source and single_step(step.axis, step.source, step.target) == step and not moved & later


def sent_bytes(step: Step, layout: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each rank sends when ``step`` is applied to a tensor of global ``shape`` in ``layout``."""
    if not step.is_collective:
        return 0
    after = layout.with_axis(step.axis, step.target)
    return _sent(step, ceil_shape(shape, layout, mesh.shape), ceil_shape(shape, after, mesh.shape), itemsize, mesh.shape[step.axis])


def _sent(step: Step, before: tuple[int, ...], after: tuple[int, ...], itemsize: int, n: int) -> int:
    """Bytes that each of n ranks sends in a collective that turns shards of shape ``before`` into ``after``, at ceil sizes."""
    if step.kind == "all_reduce":
        return -(-2 * (n - 1) * math.prod(before) * itemsize // n)
    if step.kind == "all_gather":
        return (n - 1) * math.prod(before) * itemsize
    if step.kind == "reduce_scatter":
        return (n - 1) * math.prod(after) * itemsize
    return (n - 1) * math.prod(map(min, before, after)) * itemsize


def exchange_shape(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Shape of the block that goes to one peer: ceil size of the old dim in the old layout, of the new dim in the new one."""
    before = ceil_shape(shape, layout, mesh.shape)
    after = ceil_shape(shape, layout.with_axis(step.axis, step.target), mesh.shape)
    return tuple(min(b, a) for b, a in zip(before, after, strict=True))


def walk(layout: Layout, steps: tuple[Step, ...]) -> Iterator[tuple[Layout, Step, Layout]]:
    """(layout before, step, layout after) along ``steps``."""
    for step in steps:
        after = layout.with_axis(step.axis, step.target)
        yield layout, step, after
        layout = after


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


def steps(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price = bytes_price
) -> tuple[Step, ...]:
    """The cheapest steps that turn ``source`` into ``target`` for a tensor of global ``shape`` (``itemsize`` bytes an element)."""
    return table(tuple(shape), itemsize, mesh, _partial_ops(source, target), price).steps(source, target)


def path_price(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price = bytes_price) -> float:
    """Price of the cheapest path from ``source`` to ``target``."""
    path = steps(source, target, shape, itemsize, mesh, price)
    return sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in walk(source, path))


def path_bytes(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price, axis: int) -> float:
    """Bytes that each rank sends on one axis along the steps of the cheapest path from ``source`` to ``target``."""
    paths = table(tuple(shape), itemsize, mesh, _partial_ops(source, target), price)
    return float(paths.sent(axis)[paths.index[source], paths.index[target]])


def path_communication(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price) -> float:
    """The part of ``path_price`` that is for collectives, local steps left out."""
    path = walk(source, steps(source, target, shape, itemsize, mesh, price))
    return sum(step_price(step, layout, shape, itemsize, mesh, price) for layout, step, _ in path if step.is_collective)


def step_price(step: Step, layout: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price) -> float:
    """Price of ``step`` from ``layout``; what a rank writes is its shard after the step."""
    after = layout.with_axis(step.axis, step.target)
    written = math.prod(ceil_shape(shape, after, mesh.shape)) * itemsize
    return price(step, sent_bytes(step, layout, shape, itemsize, mesh), written)


def _partial_ops(*layouts: Layout) -> tuple[str, ...]:
    return tuple(sorted({"sum", *(p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial))}))


class Table:
    """Cheapest paths between all layouts of one shape (Floyd-Warshall); ``prices[i, j]`` from layout i to layout j."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price) -> None:
        self.layouts = all_layouts(len(shape), mesh.ndim, ops)
        self.tensor = shape, itemsize, mesh
        self._sent: dict[int, np.ndarray] = {}
        self._price = price
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        count = len(self.layouts)
        local = [ceil_shape(shape, layout, mesh.shape) for layout in self.layouts]
        weights = np.full((count, count), np.inf)
        np.fill_diagonal(weights, 0.0)
        for i, layout in enumerate(self.layouts):
            for step, after in _neighbours(layout, len(shape), ops):
                j = self.index[after]
                sent = _sent(step, local[i], local[j], itemsize, mesh.shape[step.axis]) if step.is_collective else 0
                weights[i, j] = price(step, sent, math.prod(local[j]) * itemsize)
        self.prices, self.via = _all_pairs(weights)

    def steps(self, source: Layout, target: Layout) -> tuple[Step, ...]:
        path = self._path(self.index[source], self.index[target])
        out = []
        for i, j in itertools.pairwise(path):
            before, after = self.layouts[i], self.layouts[j]
            axis = next(a for a, (p, q) in enumerate(zip(before, after, strict=True)) if p != q)
            step = single_step(axis, before[axis], after[axis])
            assert step is not None
            out.append(step)
        return tuple(out)

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
                one = self.steps(self.layouts[i], self.layouts[j]) if np.isfinite(self.prices[i, j]) else ()
                found[i, j] = sum(sent_bytes(step, self.layouts[i], *self.tensor) for step in one if step.axis == axis)
        return float(found[i, j])

    @cached_property
    def communication(self) -> np.ndarray:
        """(layouts, layouts) what the collectives along each path cost, its local steps left out; 0 where there is none."""
        found = np.zeros(self.prices.shape)
        for (i, source), (j, target) in itertools.product(enumerate(self.layouts), repeat=2):
            if i != j and np.isfinite(self.prices[i, j]):
                path = walk(source, self.steps(source, target))
                found[i, j] = sum(step_price(step, layout, *self.tensor, self._price) for layout, step, _ in path if step.is_collective)
        return found

    def _path(self, i: int, j: int) -> list[int]:
        middle = self.via[i, j]
        if middle < 0:
            return [i] if i == j else [i, j]
        return self._path(i, middle)[:-1] + self._path(middle, j)


TIE = 1e-7
"""Added to each step's price, so that of two equal paths the one with fewer steps is taken."""


@lru_cache(maxsize=4096)
def table(shape: tuple[int, ...], itemsize: int, mesh: Mesh, ops: tuple[str, ...], price: Price) -> Table:
    return Table(shape, itemsize, mesh, ops, price)


def table_of(layouts: Iterable[Layout], shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price) -> Table:
    """The table in which all of these are."""
    return table(shape, itemsize, mesh, _partial_ops(*layouts), price)


def _all_pairs(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prices of the best paths and, for each pair, a node between them (-1: the direct step).

    Paths are compared with ``TIE`` added to each step; the prices are without it.
    """
    prices = weights.copy()
    distance = weights + np.where(np.eye(len(weights), dtype=bool), 0.0, TIE)
    via = np.full(weights.shape, -1, dtype=np.int32)
    for k in range(len(weights)):
        through = distance[:, k, None] + distance[None, k, :]
        better = through < distance - 1e-12
        if better.any():
            np.copyto(distance, through, where=better)
            np.copyto(prices, prices[:, k, None] + prices[None, k, :], where=better)
            via[better] = k
    return prices, via
