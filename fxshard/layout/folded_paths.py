"""Paths between plain layouts through folded ones: composite edges of the redistribution graph, besides the single steps.

If several axes shard one dim, single steps between plain layouts must start with the innermost axis. Through folded layouts, axes
leave or enter a dim in any order. That pays if a step that sends less, or leaves a smaller shard, can go first, so kinds follow a fixed
order: slices, reduce-scatters, all-to-alls, all-gathers. Steps of one kind come in every order, because axes differ in links and sizes.
Each axis moves once. Folded layouts are not nodes of the redistribution graph, which therefore stays small.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import FoldedShard, Layout, nest_of, sharded_dim
from fxshard.layout.steps import Step, is_legal, single_step

STEP_ORDER = {"slice": 0, "reduce_scatter": 1, "all_to_all": 2, "all_gather": 3}
"""Position of a kind of step in a path: steps that shrink the shard come first, steps that grow it last."""

Edge = tuple[Layout, Step, Layout]
Path = tuple[Edge, ...]


def folded_paths(layouts: Sequence[Layout], ndim: int) -> Iterator[Path]:
    """All such paths from each of ``layouts`` of a tensor of ``ndim`` dims; layouts that are equal but for a permutation of dims share
    one search."""
    known: dict[Layout, list[Path]] = {}
    for layout in layouts:
        dims = [d for d in map(sharded_dim, layout) if d is not None]
        names = list(dict.fromkeys([*dims, *range(ndim)]))
        first = Layout(_renamed(p, {d: k for k, d in enumerate(names)}) for p in layout)
        if first not in known:
            known[first] = list(_paths(first, ndim, ()))
        yield from known[first] if names == sorted(names) else (_renamed_path(path, dict(enumerate(names))) for path in known[first])


def _paths(layout: Layout, ndim: int, path: Path) -> Iterator[Path]:
    """Extends ``path`` by one axis at a time until no dim is folded; yields each complete path."""
    still = [axis for axis in range(len(layout)) if all(step.axis != axis for _, step, _ in path)]
    for axis in still:
        for target in _targets(layout, axis, still, ndim):
            step = single_step(axis, layout[axis], target)
            if (
                step is None
                or step.kind not in STEP_ORDER
                or (path and STEP_ORDER[path[-1][1].kind] > STEP_ORDER[step.kind])
                or not is_legal(step, layout)
            ):
                continue
            longer = *path, (layout, step, step.after(layout))
            if not longer[-1][2].is_folded:
                yield from [longer] if path else []
            elif len(still) > 1:
                yield from _paths(longer[-1][2], ndim, longer)


def _targets(layout: Layout, axis: int, still: Sequence[int], ndim: int) -> Iterator[Placement]:
    """Placements that ``axis`` may take; it may enter a dim before an outer axis that has ``still`` to move."""
    yield Replicate()
    for dim in range(ndim):
        held, nest = layout.held_on(dim), layout.nest_on(dim)
        yield Shard(dim)
        if nest:
            yield FoldedShard(dim, nest)
            continue
        others = [a for a in still if a != axis and a not in held]
        for count in range(1, len(others) + 1):
            for more in itertools.combinations(others, count):
                yield FoldedShard(dim, tuple(sorted((*held, axis, *more))))


def _renamed_path(path: Path, names: dict[int, int]) -> Path:
    layouts = [Layout(_renamed(p, names) for p in layout) for layout in (path[0][0], *(after for _, _, after in path))]
    steps = [Step(step.kind, step.axis, _renamed(step.source, names), _renamed(step.target, names)) for _, step, _ in path]
    return tuple(zip(layouts, steps, layouts[1:], strict=False))


def _renamed(placement: Placement, names: dict[int, int]) -> Placement:
    dim, nest = sharded_dim(placement), nest_of(placement)
    if dim is None:
        return placement
    return FoldedShard(names[dim], nest) if nest else Shard(names[dim])
