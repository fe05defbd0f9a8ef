"""Size classes: ranks whose shards have equal sizes after every axis of a cut share one lowered graph."""

from __future__ import annotations

from collections.abc import Iterable

from fxshard.layout.layouts import Layout, chunk
from fxshard.mesh.mesh import Mesh
from fxshard.program.sharded_program import SizeClass

Cut = tuple[int, tuple[int, ...]]
"""(dim size, axes that cut it in mesh order)."""


def cuts(tensors: Iterable[tuple[tuple[int, ...], Layout]], mesh: Mesh) -> tuple[Cut, ...]:
    """The distinct uneven cuts of dims in these (shape, layout) pairs. Even cuts give all ranks equal sizes; symbolic sizes are skipped."""
    pairs = (
        cut for shape, layout in tensors for dim, size in enumerate(shape) if isinstance(size, int) for cut in _cuts_of(size, layout, dim)
    )
    return tuple(sorted(cut for cut in set(pairs) if cut[1] and len({level_sizes(cut, mesh, c) for c in mesh.coordinates()}) > 1))


def _cuts_of(size: int, layout: Layout, dim: int) -> Iterable[Cut]:
    """The cut of a dim; of a packed one, those of its parts."""
    packed = layout.packed_on(dim)
    return [(size, layout.axes_on(dim))] if packed is None else [(part, (packed[0],)) for part in packed[1].parts]


def level_sizes(cut: Cut, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """Local sizes after each axis of the cut, on the rank at ``coordinate``."""
    size, axes = cut
    out = []
    for axis in axes:
        _, size = chunk(size, mesh.shape[axis], coordinate[axis])
        out.append(size)
    return tuple(out)


def size_classes(all_cuts: tuple[Cut, ...], mesh: Mesh) -> dict[tuple[int, ...], SizeClass]:
    """Each rank's coordinate -> its class; a single class if every cut is even."""
    return {c: tuple(level_sizes(cut, mesh, c) for cut in all_cuts) for c in mesh.coordinates()}
