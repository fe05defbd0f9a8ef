"""The forms in which users write layouts, read as one placement per axis, and conditions on layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import LayoutError, count_text
from fxshard.layout.layouts import Layout, normalised_placement
from fxshard.mesh.mesh import Mesh
from fxshard.plans.constraints import shown

Pattern = tuple[Placement | None, ...]
"""One placement per axis; None leaves the axis free."""


@dataclass(frozen=True)
class Condition:
    """A pattern that a layout must match or, if ``forbidden``, must not match; ``user_text``: how the user wrote it; ``output``: the result
    that it applies to, if the node has several; ``beside``: placements that will do as well as a shard if another axis shards its dim.
    ``optional``: it does not apply to an operator that can give no such layout."""

    pattern: Pattern
    user_text: str
    output: int = 0
    forbidden: bool = False
    beside: tuple[Placement, ...] = ()
    optional: bool = False

    def admits(self, layout: Layout) -> bool:
        wanted = [axis for axis, want in enumerate(self.pattern) if want is not None]
        return self.forbidden != all(self.pattern[axis] == layout[axis] or self._admits_beside(axis, layout) for axis in wanted)

    def _admits_beside(self, axis: int, layout: Layout) -> bool:
        dim = getattr(self.pattern[axis], "dim", None)
        return layout[axis] in self.beside and dim is not None and bool(set(layout.held_on(dim)) - {axis})


def pattern(layout: Any, mesh: Mesh, ndim: int, what: str) -> Pattern:
    """Reads ``"RS(0)"`` (``*``: free), a sequence of placements (None: free), or ``{"tp": Shard(0)}`` (other axes are free).

    An axis of one rank is free: all placements mean the same there.
    """
    return on_several_ranks(read_pattern(layout, mesh, ndim, what), mesh)


def on_several_ranks(pattern: Pattern, mesh: Mesh) -> Pattern:
    """The pattern without what it says of axes of one rank."""
    return tuple(p if ranks > 1 else None for p, ranks in zip(pattern, mesh.shape, strict=True))


def says_nothing(pattern: Pattern, mesh: Mesh) -> bool:
    """Whether all that it says is of axes of one rank."""
    return any(p is not None for p in pattern) and all(p is None for p in on_several_ranks(pattern, mesh))


def read_pattern(layout: Any, mesh: Mesh, ndim: int, what: str) -> Pattern:
    """As ``pattern``, with what it says of axes of one rank."""
    if isinstance(layout, str):
        layout = _parsed(layout)
    if isinstance(layout, Mapping):
        named = {mesh.axis(axis): placement for axis, placement in layout.items()}
        for axis, placement in layout.items():
            if not isinstance(placement, Placement | None):
                remedy = f"write {{{axis!r}: Shard(0)}}, Replicate() or Partial(); None leaves the axis free"
                raise LayoutError(f"{placement!r} on axis {axis!r} of {what} is not a placement", remedy=remedy)
        layout = [named.get(i) for i in range(mesh.ndim)]
    if not isinstance(layout, Sequence) or not all(p is None or isinstance(p, Placement) for p in layout):
        raise LayoutError(f"cannot read layout {layout!r} of {what}", remedy="write 'RS(0)', a sequence of placements, or {'tp': Shard(0)}")
    if len(layout) != mesh.ndim:
        axes = "1 axis" if mesh.ndim == 1 else f"{mesh.ndim} axes"
        raise LayoutError(
            f"layout {shown(layout)} of {what} has {count_text(len(layout), 'placement')}, the mesh has {axes} ({mesh})",
            remedy="give one placement per mesh axis, in mesh order",
        )
    return tuple(None if p is None else normalised_placement(p, ndim, what) for p in layout)


def _parsed(text: str) -> Sequence[Placement | None]:
    """Reads a layout with free axes: ``S(0)*``."""
    plain = Layout.parse(text.replace("*", "R"))
    free = {len(Layout.parse(text[:i].replace("*", "R"))) if i else 0 for i, c in enumerate(text) if c == "*"}
    return [None if axis in free else placement for axis, placement in enumerate(plain)]
