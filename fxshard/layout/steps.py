"""One redistribution step: a change of placement on one axis. When it is legal, which layout it leaves, how many bytes a rank sends.

Shards of a dim over several axes nest in mesh order. A step that moves the innermost axis of a dim goes between plain layouts. An axis
may also leave a dim that an inner axis still shards, or enter a dim before an outer one: then the dim is *folded* (``layouts.FoldedShard``)
until the other axes have moved too. An axis enters and leaves a packed dim only from and to R or P, while no other axis shards it.
Bytes are those of ring algorithms on n ranks: all-reduce 2(n-1)/n of the buffer, all-gather and reduce-scatter (n-1)/n of
the gathered buffer, all-to-all (n-1)/n of the local buffer; all at ceil sizes, which a padded collective sends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard.layout.layouts import (
    EXPERTS,
    ROW_DIMS,
    FoldedShard,
    Layout,
    ceil_shape,
    nest_of,
    on_experts,
    parts_of,
    placement_str,
    sharded_dim,
)
from fxshard.mesh.mesh import Mesh

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
LOCAL_STEPS = ("slice", "to_partial")
COMMUTING = {"sum", "avg"}
"""Reductions that commute with each other. A layout with any other pending reduction must have the same one on all its pending axes.
Where rows lie has nothing to do with what is added to them, so rows of experts may be pending sums on other axes."""


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
        """The tensor dims that the axis leaves and enters, as far as they exist."""
        return tuple(dim for p in (self.source, self.target) if (dim := sharded_dim(p)) is not None)

    def after(self, layout: Layout) -> Layout:
        """The layout after the step; other axes on the dims that it leaves or enters become folded, or plain again."""
        return _after(self, layout)

    def describe(self, mesh: Mesh) -> str:
        return f"{self.kind}({mesh.axis_names[self.axis]}: {placement_str(self.source)}->{placement_str(self.target)})"


@dataclass(frozen=True)
class WeightedShapes:
    """The global shapes of one dynamic tensor at several sizes, with weights that sum to 1: its redistribution costs the weighted mean."""

    shapes: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.shapes[0])

    def mean(self, figures: Sequence[float]) -> float:
        """The weighted mean of one number per shape."""
        return sum(weight * figure for weight, figure in zip(self.weights, figures, strict=True))


AnyShape = tuple[int, ...] | WeightedShapes
"""A tensor's global shape, or its weighted shapes at several sizes."""


Price = Callable[[Step, int, int], float]
"""(step, bytes that a rank sends, bytes that it writes beside that) -> price; see ``written_between``."""


@lru_cache(maxsize=65536)
def _after(step: Step, layout: Layout) -> Layout:
    found = list(layout)
    found[step.axis] = step.target
    for dim in step.dims:
        held = tuple(a for a, p in enumerate(found) if sharded_dim(p) == dim and not parts_of(p))
        entered = sharded_dim(step.target) == dim
        nest = (nest_of(step.target) if entered else layout.nest_on(dim)) or layout.held_on(dim)
        plain = not nest_of(step.target) if entered else held == nest[: len(held)]
        for axis in held:
            found[axis] = Shard(dim) if plain else FoldedShard(dim, nest)
    return Layout(found)


def bytes_price(step: Step, sent: int, written: int) -> float:
    """Price in bytes sent; local steps are free."""
    return float(sent)


@lru_cache(maxsize=4096)
def single_step(axis: int, source: Placement, target: Placement) -> Step | None:
    """The step between two placements of one axis; None if no single step does it."""
    if on_experts(source) or on_experts(target):
        return None
    kind = _KINDS.get((_placement_kind(source), _placement_kind(target)))
    if kind is None or (kind == "all_to_all" and (sharded_dim(source) == sharded_dim(target) or parts_of(source) or parts_of(target))):
        return None
    return Step(kind, axis, source, target)


_KINDS = {
    ("pending", "replicated"): "all_reduce",
    ("pending", "sharded"): "reduce_scatter",
    ("sharded", "replicated"): "all_gather",
    ("sharded", "sharded"): "all_to_all",
    ("replicated", "sharded"): "slice",
    ("replicated", "pending"): "to_partial",
}


def _placement_kind(placement: Placement) -> str:
    if sharded_dim(placement) is not None:
        return "sharded"
    return "pending" if isinstance(placement, Partial) else "replicated"


def is_legal(step: Step, layout: Layout) -> bool:
    """Whether ``step`` starts at ``layout``, has the right kind, fits the nesting of the dim that it enters, touches every folded dim,
    and has only commuting pending reductions before and after."""
    if layout[step.axis] != step.source or single_step(step.axis, step.source, step.target) != step:
        return False
    if any(nest_of(p) and sharded_dim(p) not in step.dims for p in layout) or moves_rows(step, layout):
        return False
    return _fits_nesting(step, layout) and reductions_commute(layout) and reductions_commute(step.after(layout))


def moves_rows(step: Step, layout: Layout) -> bool:
    """Whether a step would move rows that lie on the ranks of their experts, whose places only these ranks know."""
    return bool(layout.expert_axes) and any(dim in ROW_DIMS for dim in step.dims)


def _fits_nesting(step: Step, layout: Layout) -> bool:
    """Whether the axis may enter its target dim: as the innermost axis, or at its place in the nest of the folded dim."""
    dim = sharded_dim(step.target)
    if dim is None:
        return True
    held, nest = layout.held_on(dim), layout.nest_on(dim)
    if parts_of(step.target) or layout.packed_on(dim):
        return not held
    joined = tuple(sorted((*held, step.axis)))
    wanted = nest_of(step.target)
    if not wanted:
        return joined == nest if nest else joined[-1] == step.axis
    orderly = all(a < b for a, b in itertools.pairwise(wanted)) and wanted[-1] < len(layout)
    begun = nest == wanted if nest else held == wanted[: len(held)]
    return orderly and begun and set(joined) <= set(wanted) and joined != wanted[: len(joined)]


@lru_cache(maxsize=4096)
def reductions_commute(layout: Layout) -> bool:
    """Whether all pending reductions of a layout commute: equal ones do, and sums with averages."""
    ops = {p.reduce_op for p in layout if isinstance(p, Partial)} - {EXPERTS}
    return len(ops) < 2 or ops <= COMMUTING


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


def moved_between(step: Step, layout: Layout, before: tuple[int, ...], after: tuple[int, ...], itemsize: int, n: int) -> tuple[int, int]:
    """(``sent_between``, ``written_between``)."""
    return sent_between(step, before, after, itemsize, n), written_between(step, layout, before, after, itemsize)


def written_between(step: Step, layout: Layout, before: tuple[int, ...], after: tuple[int, ...], itemsize: int) -> int:
    """Bytes that each rank writes in a local step, the shard after it; in a collective, those of the copies around it.

    A collective exchanges blocks that lie one after the other. Those of a dim that is not the first do not: a copy stacks them before a
    reduce-scatter or all-to-all, and one puts them in their places after an all-gather or all-to-all. So do copies for packed dims, and
    for folded ones if pieces of an outer axis alternate with those of the step's.
    """
    if not step.is_collective:
        return math.prod(after) * itemsize
    stacked = step.kind in ("reduce_scatter", "all_to_all") and _scattered(step.target, step.axis, step.after(layout), before)
    placed = step.kind in ("all_gather", "all_to_all") and _scattered(step.source, step.axis, layout, after)
    return (stacked * math.prod(before) + placed * math.prod(after)) * itemsize


def _scattered(placement: Placement, axis: int, held: Layout, shape: tuple[int, ...]) -> bool:
    """Whether the blocks that ``axis`` cuts a dim of ``shape`` into, in the layout ``held``, are no consecutive parts of memory."""
    dim = sharded_dim(placement)
    if dim is None:
        return False
    alternate = any(outer < axis and outer not in held.held_on(dim) for outer in nest_of(placement))
    return bool(parts_of(placement)) or alternate or math.prod(shape[:dim]) > 1


def without_copies(price: Price) -> Price:
    """The price of collectives without the copies around them."""
    return lambda step, sent, written: price(step, sent, 0)


def block_between(step: Step, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the block that an all-to-all sends to one peer: ``before`` with the size of ``after`` in the dim that the step enters."""
    entered = sharded_dim(step.target)
    return tuple(after[d] if d == entered else size for d, size in enumerate(before))


def exchange_shape(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Shape of the block that an all-to-all sends to one peer, from a global ``shape``, at ceil sizes."""
    return block_between(step, ceil_shape(shape, layout, mesh.shape), ceil_shape(shape, step.after(layout), mesh.shape))


def step_price(step: Step, layout: Layout, shape: AnyShape, itemsize: int, mesh: Mesh, price: Price) -> float:
    """Price of ``step`` from ``layout``, the weighted mean over several shapes."""
    if isinstance(shape, WeightedShapes):
        return shape.mean([step_price(step, layout, one, itemsize, mesh, price) for one in shape.shapes])
    before, after = (ceil_shape(shape, at, mesh.shape) for at in (layout, step.after(layout)))
    return price(step, *moved_between(step, layout, before, after, itemsize, mesh.shape[step.axis]))
