"""Layouts: how one tensor lies on a mesh, one placement per axis.

Shards follow DTensor: an axis of n ranks cuts a dim of size L into chunks of ceil(L / n); the last ones may be short or
empty. If several axes shard one dim, they nest in mesh order: each axis cuts the chunk of the axis before it.
A dim of several parts, such as that of ``[q | k | v]``, may be packed (``PackedShard``): one axis cuts each part, no other axis the dim.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard._torch_compat.sizes.symbols import are_numbers, surely
from fxshard.errors import LayoutError, count_text

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
EXPERTS = "experts"
"""The ``reduce_op`` of rows that lie on the ranks of their experts (``strategies.linear.expert_rows``). Nothing reduces them: only the
operator that collects rows gives them another placement on the axis."""
ROW_DIMS = (0, 1)
"""The dims of such a tensor that count its rows: token, choice."""
_TOKEN = re.compile(r"R|S\((-?[0-9]{1,9})(?::(packed|[0-9]{1,12}(?:\+[0-9]{1,12})+))?\)|P(?:\((\w+)\))?")


@dataclass(frozen=True)
class FoldedShard(Placement):
    """The placement of a shard between two redistribution steps; values in a plan never have it. Tensor dim ``dim`` is cut over the axes of
    ``nest`` in turn, with each piece padded to the ceil size. The axis holds only its own pieces; for the axes of ``nest`` that do not
    shard ``dim`` at the moment, a rank holds all pieces, in the order of ``nest``. Arises when an outer axis leaves the dim before an
    inner one does, or enters it after an inner one.
    """

    dim: int
    nest: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__init__()  # a dataclass does not call torch's initialiser

    def __reduce__(self) -> tuple[type[FoldedShard], tuple[int, tuple[int, ...]]]:
        return FoldedShard, (self.dim, self.nest)


def sharded_dim(placement: Placement) -> int | None:
    """The tensor dim that an axis with this placement shards, folded or not; else None. (``isinstance`` is slow on torch's placements.)"""
    return getattr(placement, "dim", None)


def on_experts(placement: Placement) -> bool:
    """Whether each rank holds the rows of its own experts."""
    return isinstance(placement, Partial) and placement.reduce_op == EXPERTS


def parts_of(placement: Placement) -> tuple[int, ...]:
    """The sizes of the parts, each of which the axis cuts; empty unless the dim is packed."""
    return getattr(placement, "parts", ())


def nest_of(placement: Placement) -> tuple[int, ...]:
    """The axes over which the dim is folded; empty if it is not."""
    return getattr(placement, "nest", ())


class Layout(tuple[Placement, ...]):
    """One placement per mesh axis, in mesh order; compares and hashes like the tuple, prints as ``S(0)R``.

    Caches its hash, since torch hashes placements in Python. Pickles omit it: string hashes differ between processes.
    """

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = tuple.__hash__(self)
            return self._hash

    def __getstate__(self) -> None:
        return None

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads ``"RS(0)"``, ``"PR"``, ``"P(avg)S(-1)"``, ``"S(0:8+4+4)"``, ``"S(0:packed)"``; raises LayoutError on anything else."""
        return _parse(text)

    @classmethod
    def replicated(cls, axes: int) -> Layout:
        return cls([Replicate()] * axes)

    def with_axis(self, axis: int, placement: Placement) -> Layout:
        return Layout(self[:axis] + (placement,) + self[axis + 1 :])

    def axes_on(self, dim: int) -> tuple[int, ...]:
        """Indexes of the mesh axes that shard tensor dim ``dim``, in mesh order."""
        return _axes_on(self, dim)

    def held_on(self, dim: int) -> tuple[int, ...]:
        """Indexes of the mesh axes that shard ``dim``, folded or not."""
        return tuple(i for i, p in enumerate(self) if sharded_dim(p) == dim)

    def nest_on(self, dim: int) -> tuple[int, ...]:
        """The axes over which ``dim`` is folded; empty if it is not."""
        return next((nest_of(p) for p in self if sharded_dim(p) == dim), ())

    def packed_on(self, dim: int) -> tuple[int, PackedShard] | None:
        """(axis, placement) if ``dim`` is packed, else None."""
        return _packed_on(self, dim)

    @property
    def packed(self) -> tuple[PackedShard, ...]:
        """The placements that shard a packed dim."""
        return tuple(p for p in self if isinstance(p, PackedShard))

    @property
    def is_folded(self) -> bool:
        return any(map(nest_of, self))

    @property
    def has_partial(self) -> bool:
        return any(isinstance(p, Partial) for p in self)

    @property
    def expert_axes(self) -> tuple[int, ...]:
        """The axes whose ranks hold the rows of their own experts, in mesh order."""
        return tuple(i for i, p in enumerate(self) if on_experts(p))

    @property
    def is_replicated(self) -> bool:
        return all(isinstance(p, Replicate) for p in self)

    def __str__(self) -> str:
        return "".join(map(placement_str, self))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{axis}</td><td><code>{placement_str(p)}</code></td></tr>" for axis, p in enumerate(self))
        return f"<table><tr><th>axis</th><th>placement</th></tr>{rows}</table>"


@lru_cache(maxsize=65536)
def _axes_on(layout: Layout, dim: int) -> tuple[int, ...]:
    return tuple(i for i, p in enumerate(layout) if isinstance(p, Shard) and p.dim == dim)


@lru_cache(maxsize=65536)
def _packed_on(layout: Layout, dim: int) -> tuple[int, PackedShard] | None:
    return next(((i, p) for i, p in enumerate(layout) if isinstance(p, PackedShard) and p.dim == dim), None)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    placements: list[Placement] = []
    position = 0
    for match in _TOKEN.finditer(text):
        if match.start() != position:
            break
        position = match.end()
        token, dim, parts, op = match.group(0), match.group(1), match.group(2), match.group(3)
        if token == "R":
            placements.append(Replicate())
        elif parts is not None:
            placements.append(PackedShard(int(dim), () if parts == "packed" else tuple(map(int, parts.split("+")))))
        elif dim is not None:
            placements.append(Shard(int(dim)))
        elif (op or "sum") in (*REDUCE_OPS, EXPERTS):
            placements.append(Partial(op or "sum"))
        else:
            raise LayoutError(f"unknown reduction {op!r} in layout {text!r}", remedy=f"use one of {REDUCE_OPS}")
    if position != len(text) or not text:
        raise LayoutError(
            f"cannot read layout {text!r} at position {position}",
            remedy="write one of R, S(dim), P, P(op) per mesh axis, without separators, for example 'RS(0)'",
        )
    return Layout(placements)


def placement_str(placement: Placement) -> str:
    """``R``, ``S(d)``, ``P`` (a pending sum), ``P(op)`` or ``P(experts)``; ``S(d:8+4+4)`` for a dim in parts of 8, 4 and 4, and
    ``S(d in 0,1)`` for one that is folded over axes 0 and 1."""
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    if isinstance(placement, PackedShard):
        return f"S({placement.dim}:{'+'.join(map(str, placement.parts)) or 'packed'})"
    if isinstance(placement, FoldedShard):
        return f"S({placement.dim} in {','.join(map(str, placement.nest))})"
    raise LayoutError(f"placement {placement!r} is not supported", remedy="use Shard, Replicate or Partial")


class RankIndex(int):
    """An index on an axis, for all ranks of a size class. The integer is the index of one of these ranks, for chunks of integer sizes;
    ``symbol`` is the index of whichever rank runs, for chunks of symbolic sizes."""

    symbol: Any

    def __new__(cls, index: int, symbol: Any) -> RankIndex:
        made = super().__new__(cls, index)
        made.symbol = symbol
        return made


def symbolic_coordinate(coordinate: Sequence[int], numbers: Sequence[Any]) -> tuple[int, ...]:
    """``coordinate`` with symbolic indexes: ``numbers`` are symbols for the rank's place on each axis, counted from 1."""
    return tuple(RankIndex(index, number - 1) for index, number in zip(coordinate, numbers, strict=True))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of chunk ``index`` when ``size`` elements (an integer or a symbol) are cut over ``parts`` ranks."""
    if isinstance(size, torch.SymInt):
        return symbolic_chunk(size, parts, index.symbol if isinstance(index, RankIndex) else index)
    return _chunk(size, parts, index)


@lru_cache(maxsize=65536)
def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    step = -(-size // parts)
    offset = min(index * step, size)
    return offset, min(step, size - offset)


def symbolic_chunk(size: Any, parts: int, index: int) -> tuple[Any, Any]:
    """``chunk`` of a symbolic size. Chunk 0 always has the ceil size, and so have all chunks if ``parts`` is known to divide ``size``."""
    step = -(-size // parts)
    if (isinstance(index, int) and index == 0) or surely(step * parts == size):
        return index * step, step
    return torch.sym_min(index * step, size), torch.sym_max(
        0, torch.sym_min(step, size - index * step)
    )  # makes the bound >= 0 visible to torch


def chunk_lengths(size: int, parts: int) -> tuple[int, ...]:
    return tuple(chunk(size, parts, i)[1] for i in range(parts))


def nested_chunk(size: int, parts: tuple[int, ...], indexes: tuple[int, ...]) -> tuple[int, int]:
    """(offset, length) of a dim cut over several axes in turn; ``parts`` and ``indexes`` hold one entry per axis."""
    offset = 0
    for n, i in zip(parts, indexes, strict=True):
        start, size = chunk(size, n, i)
        offset += start
    return offset, size


def _dim_extent(size: int, layout: Layout, dim: int, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, int]:
    nest = layout.nest_on(dim)
    if nest:
        held = layout.held_on(dim)
        return 0, folded_piece_size(size, nest, mesh_shape) * math.prod(mesh_shape[a] for a in nest if a not in held)
    packed = layout.packed_on(dim)
    if packed is not None:
        axis, placement = packed
        return 0, sum(length for _, length in packed_chunks(placement.parts, mesh_shape[axis], coordinate[axis]))
    axes = layout.axes_on(dim)
    return nested_chunk(size, tuple(mesh_shape[a] for a in axes), tuple(coordinate[a] for a in axes))


def packed_chunks(parts: Sequence[int], ranks: int, index: int) -> list[tuple[int, int]]:
    """(offset in the whole dim, length) of each part's shard on rank ``index`` of an axis of ``ranks``."""
    starts = itertools.accumulate(parts, initial=0)
    chunks = (chunk(part, ranks, index) for part in parts)
    return [(start + offset, length) for start, (offset, length) in zip(starts, chunks, strict=False)]


_cached_extent = lru_cache(maxsize=262144)(_dim_extent)


def folded_piece_size(size: int, nest: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Ceil size of one piece when a dim of ``size`` is cut over the axes of ``nest`` in turn."""
    for axis in nest:
        size = -(-size // mesh_shape[axis])
    return size


def dim_extent(size: int, layout: Layout, dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, int]:
    """(offset, length) of tensor dim ``dim`` of global size ``size`` on the rank at ``coordinate``; the offset of a folded
    or packed dim is 0."""
    known = _dim_extent if isinstance(size, torch.SymInt) else _cached_extent
    return known(size, layout, dim, tuple(mesh_shape), tuple(coordinate))


def local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Shape of the shard on the rank at ``coordinate``."""
    try:
        return _cached_shape(tuple(shape), layout, tuple(mesh_shape), tuple(coordinate))
    except TypeError:  # symbolic sizes do not hash
        return _local_shape(shape, layout, mesh_shape, coordinate)


def _local_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim_extent(s, layout, d, mesh_shape, coordinate)[1] for d, s in enumerate(shape))


_cached_shape = lru_cache(maxsize=65536)(_local_shape)


def local_offset(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    """Global index of the shard's first element on the rank at ``coordinate``."""
    return tuple(dim_extent(s, layout, d, mesh_shape, coordinate)[0] for d, s in enumerate(shape))


@dataclass(frozen=True)
class Block:
    """A contiguous part of a shard: its ``offset`` in the whole tensor, its ``start`` in the shard, and its ``shape``."""

    offset: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def here(self) -> tuple[slice, ...]:
        """Where it is in the shard."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    @property
    def there(self) -> tuple[slice, ...]:
        """Where it is in the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


def local_blocks(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of the shard on the rank at ``coordinate``: one, or one for each part of a packed dim."""
    ranges: list[list[tuple[int, int, int]]] = []
    for dim, size in enumerate(shape):
        packed = layout.packed_on(dim)
        if packed is None:
            offset, length = dim_extent(size, layout, dim, mesh_shape, coordinate)
            ranges.append([(offset, 0, length)])
            continue
        axis, placement = packed
        chunks = packed_chunks(placement.parts, mesh_shape[axis], coordinate[axis])
        starts = itertools.accumulate((length for _, length in chunks), initial=0)
        ranges.append([(offset, start, length) for (offset, length), start in zip(chunks, starts, strict=False)])
    return tuple(Block(*(tuple(r[k] for r in chosen) for k in range(3))) for chosen in itertools.product(*ranges))


def ceil_shape(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the largest shard: that of the rank at coordinate zero, and of every collective's buffer."""
    return local_shape(shape, layout, mesh_shape, (0,) * len(mesh_shape))


def is_emptied(local: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether sharding left a dim without elements: size 0 in ``local`` but not in ``whole``."""
    if are_numbers(local) and 0 not in local:
        return False
    return any(a == 0 != b for a, b in zip(local, whole, strict=True) if isinstance(a, int))


def check_layout(layout: Layout, ndim: int, axes: int, what: str) -> Layout:
    """``layout`` with non-negative dims; raises LayoutError if it cannot describe an ``ndim``-dim tensor on ``axes`` axes."""
    if len(layout) != axes:
        raise LayoutError(
            f"layout {layout} of {what} has {len(layout)} placements, the mesh has {axes} axes",
            remedy="give one placement per mesh axis, in mesh order",
        )
    return Layout(normalised_placement(p, ndim, what) for p in layout)


def normalised_placement(placement: Placement, ndim: int, what: str) -> Placement:
    """``placement`` with a non-negative dim; raises LayoutError when the dim is out of range for ``ndim`` dims."""
    if not isinstance(placement, Shard | PackedShard):
        if isinstance(placement, FoldedShard):
            raise LayoutError(
                f"{what} cannot have the placement {placement_str(placement)}", remedy="only redistributions pass through such layouts"
            )
        placement_str(placement)
        return placement
    if not -ndim <= placement.dim < ndim:
        raise LayoutError(
            f"dim {placement.dim} in {placement_str(placement)} is out of range for {what}, which has {count_text(ndim, 'dim')}",
            remedy=f"use a dim from 0 to {ndim - 1}" if ndim else "a scalar can only be replicated or partial",
        )
    return PackedShard(placement.dim % ndim, placement.parts) if isinstance(placement, PackedShard) else Shard(placement.dim % ndim)


def canonical(layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """``layout`` with Replicate on axes of one rank, where all placements mean the same."""
    if 1 not in mesh_shape:
        return layout
    return Layout(p if ranks > 1 else Replicate() for p, ranks in zip(layout, mesh_shape, strict=True))


def same_layout(a: Layout, b: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether two layouts put the same elements on each rank: they may differ on axes of one rank."""
    return a == b or canonical(a, mesh_shape) == canonical(b, mesh_shape)


def sharding_axes(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The axes of several ranks, on which placements differ."""
    return tuple(axis for axis, ranks in enumerate(mesh_shape) if ranks > 1)


def all_layouts(
    ndim: int, mesh_shape: Sequence[int], reduce_ops: Iterable[str] = ("sum",), packed: Sequence[PackedShard] = ()
) -> list[Layout]:
    """Every canonical layout of an ``ndim``-dim tensor, replicated first, for searches and tests; ``packed``: ways to pack its dims,
    last."""
    one = [Replicate(), *(Shard(d) for d in range(ndim)), *(Partial(op) for op in reduce_ops)]
    plain = [Layout(p) for p in itertools.product(*(one if ranks > 1 else one[:1] for ranks in mesh_shape))]
    if not packed:
        return plain
    mixed = (Layout(p) for p in itertools.product(*([*one, *packed] if ranks > 1 else one[:1] for ranks in mesh_shape)))
    return [*plain, *(layout for layout in mixed if layout.packed and all(len(layout.held_on(p.dim)) == 1 for p in layout.packed))]
