"""One step of a redistribution: a change of placement on one axis, when it is legal, what it leaves and the bytes that a rank sends.

Shards of a dim over several axes are nested in mesh order. So long as all axes but the innermost ones of a dim stay, a step leaves
plain layouts. An axis may also leave a dim that a later axis goes on cutting, or come into one before an axis that has its place
before it: then the dim is *folded* (``layout.Folded``) until the others have followed.
Bytes follow the ring forms of a buffer N on n ranks: all-reduce 2(n-1)/n N, all-gather and reduce-scatter (n-1)/n of
the whole, all-to-all (n-1)/n of the local buffer; all at ceil sizes, which is what a padded collective sends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import Folded, Layout, ceil_shape, dim_cut_by, nest_of, placement_str
from fxshard.mesh.mesh import Mesh

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
LOCAL_STEPS = ("slice", "to_partial")
LINEAR = {"sum", "avg"}
"""Pending reductions that may be done in any order; of others, all axes of a layout must have the same."""


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

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor dims that the axis leaves and enters."""
        return tuple(dim for p in (self.source, self.target) if (dim := dim_cut_by(p)) is not None)

    def after(self, layout: Layout) -> Layout:
        """The layout that the step leaves: other axes on the dims that it leaves or enters lie folded, or plain again."""
        return _after(self, layout)

    def describe(self, mesh: Mesh) -> str:
        return f"{self.kind}({mesh.axis_names[self.axis]}: {placement_str(self.source)}->{placement_str(self.target)})"


@dataclass(frozen=True)
class Shapes:
    """The global shape of one tensor at several sizes, with weights that add up to 1: what moving it costs is the mean."""

    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.shapes[0])

    def mean(self, figures: Sequence[float]) -> float:
        """The mean of one figure a shape."""
        return sum(weight * figure for weight, figure in zip(self.weights, figures, strict=True))


Extent = tuple[int, ...] | Shapes
"""A tensor's global shape, or those that it has at several sizes."""


Price = Callable[[Step, int, int], float]
"""(step, bytes sent by a rank, bytes that a rank writes locally) -> price."""


@lru_cache(maxsize=65536)
def _after(step: Step, layout: Layout) -> Layout:
    found = list(layout)
    found[step.axis] = step.target
    for dim in step.dims:
        held = tuple(a for a, p in enumerate(found) if dim_cut_by(p) == dim)
        entered = dim_cut_by(step.target) == dim
        nest = (nest_of(step.target) if entered else layout.nest_on(dim)) or layout.held_on(dim)
        plain = not nest_of(step.target) if entered else held == nest[: len(held)]
        for axis in held:
            found[axis] = Shard(dim) if plain else Folded(dim, nest)
    return Layout(found)


def bytes_price(step: Step, sent: int, written: int) -> float:
    """Bytes sent; local steps are free."""
    return float(sent)


@lru_cache(maxsize=4096)
def single_step(axis: int, source: Placement, target: Placement) -> Step | None:
    """The step between two placements of one axis, None where it takes more than one."""
    kind = _KINDS.get((_sort(source), _sort(target)))
    if kind is None or (kind == "all_to_all" and dim_cut_by(source) == dim_cut_by(target)):
        return None
    return Step(kind, axis, source, target)


_KINDS = {
    ("pending", "whole"): "all_reduce",
    ("pending", "cut"): "reduce_scatter",
    ("cut", "whole"): "all_gather",
    ("cut", "cut"): "all_to_all",
    ("whole", "cut"): "slice",
    ("whole", "pending"): "to_partial",
}


def _sort(placement: Placement) -> str:
    if dim_cut_by(placement) is not None:
        return "cut"
    return "pending" if isinstance(placement, Partial) else "whole"


def is_legal(step: Step, layout: Layout) -> bool:
    """Whether ``step`` starts at ``layout``, is of its kind, finds its place in the dim that it enters, goes on with what is folded,
    and leaves no pending reductions whose order would matter."""
    if layout[step.axis] != step.source or single_step(step.axis, step.source, step.target) != step:
        return False
    if any(nest_of(p) and dim_cut_by(p) not in step.dims for p in layout):
        return False
    return _fits(step, layout) and in_any_order(layout) and in_any_order(step.after(layout))


def _fits(step: Step, layout: Layout) -> bool:
    """Whether the axis has its place in the dim that it enters: behind all others, or where the dim is folded for it."""
    dim = dim_cut_by(step.target)
    if dim is None:
        return True
    held, nest = layout.held_on(dim), layout.nest_on(dim)
    joined = tuple(sorted((*held, step.axis)))
    wanted = nest_of(step.target)
    if not wanted:
        return joined == nest if nest else joined[-1] == step.axis
    orderly = all(a < b for a, b in itertools.pairwise(wanted)) and wanted[-1] < len(layout)
    begun = nest == wanted if nest else held == wanted[: len(held)]
    return orderly and begun and set(joined) <= set(wanted) and joined != wanted[: len(joined)]


def in_any_order(layout: Layout) -> bool:
    """Whether all pending reductions of a layout may be done in any order: alike ones, and sums with means."""
    ops = {p.reduce_op for p in layout if isinstance(p, Partial)}
    return len(ops) < 2 or ops <= LINEAR


def walk(layout: Layout, steps: tuple[Step, ...]) -> Iterator[tuple[Layout, Step, Layout]]:
    """(layout before, step, layout after) along ``steps``."""
    for step in steps:
        after = step.after(layout)
        yield layout, step, after
        layout = after


def sent_bytes(step: Step, layout: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that each rank sends when ``step`` is applied to a tensor of global ``shape`` in ``layout``."""
    after = step.after(layout)
    return sent_between(step, ceil_shape(shape, layout, mesh.shape), ceil_shape(shape, after, mesh.shape), itemsize, mesh.shape[step.axis])


def sent_between(step: Step, before: tuple[int, ...], after: tuple[int, ...], itemsize: int, n: int) -> int:
    """Bytes that each of n ranks sends in a step that turns shards of shape ``before`` into ``after``, at ceil sizes."""
    if not step.is_collective:
        return 0
    if step.kind == "all_reduce":
        return -(-2 * (n - 1) * math.prod(before) * itemsize // n)
    if step.kind == "all_gather":
        return (n - 1) * math.prod(before) * itemsize
    if step.kind == "reduce_scatter":
        return (n - 1) * math.prod(after) * itemsize
    return (n - 1) * math.prod(block_between(step, before, after)) * itemsize


def block_between(step: Step, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block that an all-to-all sends to one peer: of ``before``, and in the dim that it enters of ``after``."""
    entered = dim_cut_by(step.target)
    return tuple(after[d] if d == entered else size for d, size in enumerate(before))


def exchange_shape(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Shape of the block that goes to one peer: ceil size of the old dim in the old layout, of the new dim in the new one."""
    return block_between(step, ceil_shape(shape, layout, mesh.shape), ceil_shape(shape, step.after(layout), mesh.shape))


def step_price(step: Step, layout: Layout, shape: Extent, itemsize: int, mesh: Mesh, price: Price) -> float:
    """Price of ``step`` from ``layout``, of several shapes the mean; what a rank writes is its shard after the step."""
    if isinstance(shape, Shapes):
        return shape.mean([step_price(step, layout, one, itemsize, mesh, price) for one in shape.shapes])
    before, after = (ceil_shape(shape, at, mesh.shape) for at in (layout, step.after(layout)))
    sent = sent_between(step, before, after, itemsize, mesh.shape[step.axis])
    return price(step, sent, math.prod(after) * itemsize)
