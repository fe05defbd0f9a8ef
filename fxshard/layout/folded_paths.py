"""Paths between plain layouts through folded ones: composite edges of the redistribution graph, besides the single steps.

If several axes shard one dim, single steps between plain layouts must start with the innermost axis. Through folded layouts, axes
leave or enter a dim in any order. That pays if a step that sends less, or leaves a smaller shard, can go first, so kinds follow a fixed
order: slices, reduce-scatters, all-to-alls, all-gathers. Steps of one kind come in every order, because axes differ in links and sizes.
Each axis moves once. Folded layouts are not nodes of the redistribution graph, which therefore stays small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import FoldedShard, Layout, nest_of, sharded_dim
from fxshard.layout.steps import Step, is_legal, single_step

STEP_ORDER = {"slice": 0, "reduce_scatter": 1, "all_to_all": 2, "all_gather": 3}
"""Position of a kind of step in a path: steps that shrink the shard come first, steps that grow it last."""

Edge = tuple[Layout, Step, Layout]
Path = tuple[Edge, ...]


def folded_paths(layouts: Sequence[Layout], ndim: int, axes: Sequence[int]) -> Iterator[Path]:
    """All such paths on ``axes`` from each of ``layouts`` of a tensor of ``ndim`` dims; layouts that are equal but for a permutation of
    dims share one search."""
    search = _Search(ndim)
    known: dict[Layout, list[Path]] = {}
    renamings: dict[tuple[int, ...], _Renaming] = {}
    for layout in layouts:
        dims = [d for d in map(sharded_dim, layout) if d is not None]
        names = tuple(dict.fromkeys([*dims, *range(ndim)]))
        first = Layout(_renamed(p, {d: k for k, d in enumerate(names)}) for p in layout)
        if first not in known:
            known[first] = [path for path in search.paths(first, tuple(axes), 0) if len(path) > 1]
        if names == tuple(range(ndim)):
            yield from known[first]
        else:
            renaming = renamings.setdefault(names, _Renaming(names))
            yield from (tuple(map(renaming.edge, path)) for path in known[first])


class _Search:
    """Paths to plain layouts; the layouts in between are folded. Many paths begin differently and end alike, so ends are remembered."""

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim
        self.known: dict[tuple[Layout, tuple[int, ...], int], list[Path]] = {}

    def paths(self, layout: Layout, still: tuple[int, ...], order: int) -> list[Path]:
        """Those from ``layout`` on which the axes ``still`` may move, by kinds of step whose place in the order is at least ``order``."""
        if (layout, still, order) not in self.known:
            self.known[layout, still, order] = list(self._extended(layout, still, order))
        return self.known[layout, still, order]

    def _extended(self, layout: Layout, still: tuple[int, ...], order: int) -> Iterator[Path]:
        folded = {sharded_dim(p) for p in layout if nest_of(p)}
        for axis in still:
            others, source = tuple(a for a in still if a != axis), sharded_dim(layout[axis])
            for target in _targets(layout, axis, still, self.ndim):
                if not folded <= {source, sharded_dim(target)}:
                    continue  # most targets end here: ``is_legal`` would say so too, and takes longer
                step = single_step(axis, layout[axis], target)
                if step is None or STEP_ORDER.get(step.kind, -1) < order or not is_legal(step, layout):
                    continue
                edge = layout, step, step.after(layout)
                if not edge[-1].is_folded:
                    yield (edge,)
                else:
                    yield from ((edge, *rest) for rest in self.paths(edge[-1], others, STEP_ORDER[step.kind]))


def _targets(layout: Layout, axis: int, still: Sequence[int], ndim: int) -> Iterator[Placement]:
    """Placements that ``axis`` may take; it may enter a dim before an outer axis that has ``still`` to move."""
    yield Replicate()
    for dim in range(ndim):
        held, nest = layout.held_on(dim), layout.nest_on(dim)
        yield _shard(dim)
        if nest:
            yield _shard(dim, nest)
            continue
        others = [a for a in still if a != axis and a not in held]
        for count in range(1, len(others) + 1):
            for more in itertools.combinations(others, count):
                yield _shard(dim, tuple(sorted((*held, axis, *more))))


class _Renaming:
    """Edges with other dims: dim k becomes ``names[k]``. Paths have many edges in common."""

    def __init__(self, names: Sequence[int]) -> None:
        self.names = dict(enumerate(names))
        self.edges: dict[Edge, Edge] = {}

    def edge(self, edge: Edge) -> Edge:
        if edge not in self.edges:
            before, step, after = edge
            renamed = Step(step.kind, step.axis, _renamed(step.source, self.names), _renamed(step.target, self.names))
            self.edges[edge] = self._layout(before), renamed, self._layout(after)
        return self.edges[edge]

    def _layout(self, layout: Layout) -> Layout:
        return Layout(_renamed(p, self.names) for p in layout)


def _renamed(placement: Placement, names: dict[int, int]) -> Placement:
    dim = sharded_dim(placement)
    return placement if dim is None else _shard(names[dim], nest_of(placement))


@lru_cache(maxsize=4096)
def _shard(dim: int, nest: tuple[int, ...] = ()) -> Placement:
    """The placement, made once: torch's take long to make."""
    return FoldedShard(dim, nest) if nest else Shard(dim)
