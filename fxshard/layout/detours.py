"""Sequences of steps between plain layouts through folded ones: what the graph of paths has beside single steps.

Where several axes cut one dim, single steps on plain layouts must begin with the innermost of them. Through folded layouts axes
leave a dim, or come into it, in any order, which pays where it lets the step that sends less, or makes less, go first: slices, then
reduce-scatters, then all-to-alls, then all-gathers. Among equals every order is there, for axes have links and sizes of their own.
Each axis moves once. Of the layouts on the way only plain ones are nodes of the graph of paths, which stays as small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import Folded, Layout, dim_cut_by, nest_of
from fxshard.layout.steps import Step, is_legal, single_step

RANK = {"slice": 0, "reduce_scatter": 1, "all_to_all": 2, "all_gather": 3}
"""What makes a shard smaller goes before what sends as much as there is, and that before what makes it larger."""

Edge = tuple[Layout, Step, Layout]
Way = tuple[Edge, ...]


def detours(layouts: Sequence[Layout], ndim: int) -> Iterator[Way]:
    """All from each of ``layouts`` of a tensor of ``ndim`` dims, found once for those that differ in the names of dims only."""
    known: dict[Layout, list[Way]] = {}
    for layout in layouts:
        dims = [d for d in map(dim_cut_by, layout) if d is not None]
        names = list(dict.fromkeys([*dims, *range(ndim)]))
        first = Layout(_renamed(p, {d: k for k, d in enumerate(names)}) for p in layout)
        if first not in known:
            known[first] = list(_ways(first, ndim, ()))
        yield from known[first] if names == sorted(names) else (_way(way, dict(enumerate(names))) for way in known[first])


def _ways(layout: Layout, ndim: int, path: Way) -> Iterator[Way]:
    """Axes move one after another, each in its turn, until no dim is folded any more."""
    still = [axis for axis in range(len(layout)) if all(step.axis != axis for _, step, _ in path)]
    for axis in still:
        for target in _targets(layout, axis, still, ndim):
            step = single_step(axis, layout[axis], target)
            if step is None or step.kind not in RANK or (path and RANK[path[-1][1].kind] > RANK[step.kind]) or not is_legal(step, layout):
                continue
            way = *path, (layout, step, step.after(layout))
            if not way[-1][2].is_folded:
                yield from [way] if path else []
            elif len(still) > 1:
                yield from _ways(way[-1][2], ndim, way)


def _targets(layout: Layout, axis: int, still: Sequence[int], ndim: int) -> Iterator[Placement]:
    """What may become of an axis; it may come into a dim before axes that are ``still`` to move."""
    yield Replicate()
    for dim in range(ndim):
        held, nest = layout.held_on(dim), layout.nest_on(dim)
        yield Shard(dim)
        if nest:
            yield Folded(dim, nest)
            continue
        others = [a for a in still if a != axis and a not in held]
        for count in range(1, len(others) + 1):
            for more in itertools.combinations(others, count):
                yield Folded(dim, tuple(sorted((*held, axis, *more))))


def _way(way: Way, names: dict[int, int]) -> Way:
    layouts = [Layout(_renamed(p, names) for p in layout) for layout in (way[0][0], *(after for _, _, after in way))]
    steps = [Step(step.kind, step.axis, _renamed(step.source, names), _renamed(step.target, names)) for _, step, _ in way]
    return tuple(zip(layouts, steps, layouts[1:], strict=False))


def _renamed(placement: Placement, names: dict[int, int]) -> Placement:
    dim, nest = dim_cut_by(placement), nest_of(placement)
    if dim is None:
        return placement
    return Folded(names[dim], nest) if nest else Shard(names[dim])
