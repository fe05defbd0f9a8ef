"""``fxshard.visualize``: which rank holds which block of a tensor, drawn as text, and as a table in notebooks.

torch's ``visualize_sharding`` draws DTensors of one or two dims on meshes of one or two axes, one box for each rank. This draws any number
of dims and axes, uneven and packed shards, and gives ranks that hold the same block one box.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from fxshard.errors import OptionError, a_kind
from fxshard.layout.layouts import Layout, check_layout, local_blocks, on_experts
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.text_table import number_runs
from fxshard.views.words import layout_words, shape_text

Range = tuple[int, int]
"""A half-open range of a dim's indices."""
Cell = tuple[Range, ...]
"""A range for each dim that is cut."""


def visualize(value: Any, shape: Sequence[int] | None = None, mesh: Mesh | DeviceMesh | Mapping[str, int] | None = None) -> Picture:
    """Which rank holds which block; ``print`` it, or leave it as the last value of a notebook's cell.

        fxshard.visualize(dtensor)
        fxshard.visualize("S(0)S(1)", (8, 6), {"dp": 2, "tp": 3})

    Args:
        value: a DTensor, or a layout as text, as a ``Layout`` or as a sequence of torch's placements, one per axis.
        shape: of a layout's tensor. mesh: of a layout: a mesh, or its axes and their sizes.

    Raises:
        OptionError: a layout without shape or mesh, or another value. LayoutError: a layout that does not fit.
    """
    if isinstance(value, DTensor):
        return Picture(Layout(value.placements), tuple(value.shape), as_mesh(value.device_mesh))
    if not isinstance(value, str | Sequence):
        remedy = "give a DTensor, or a layout with the tensor's shape and mesh: fxshard.visualize('S(0)R', (8, 4), {'dp': 2, 'tp': 2})"
        raise OptionError(f"{a_kind(value)} has no layout to draw", where="visualize", remedy=remedy)
    layout = Layout.parse(value) if isinstance(value, str) else Layout(value)
    if shape is None or mesh is None:
        remedy = f"fxshard.visualize({str(layout)!r}, (8, 4), {{'dp': 2, 'tp': 2}})"
        raise OptionError("a layout alone does not say which block a rank holds", where="visualize", remedy=f"add shape and mesh: {remedy}")
    whole = Mesh(mesh) if isinstance(mesh, Mapping) else as_mesh(mesh)
    return Picture(check_layout(layout, len(shape), whole.ndim, f"a tensor of shape {tuple(shape)}"), tuple(map(int, shape)), whole)


@dataclass(frozen=True)
class Picture:
    """A tensor's blocks on a mesh. ``holders`` says the same as data."""

    layout: Layout
    shape: tuple[int, ...]
    mesh: Mesh

    @cached_property
    def blocks(self) -> list[tuple[int, list[tuple[Range, ...]]]]:
        """(rank, its blocks, a range for each dim)."""
        found = []
        for coordinate in self.mesh.coordinates():
            blocks = local_blocks(self.shape, self.layout, self.mesh.shape, coordinate)
            kept = [tuple((a, a + n) for a, n in zip(b.offset, b.shape, strict=True)) for b in blocks if 0 not in b.shape]
            found.append((self.mesh.rank(coordinate), kept))
        return found

    @cached_property
    def ranges(self) -> list[list[Range]]:
        """For each dim, the ranges between all the places where some rank cuts it."""
        edges = [{0, size} for size in self.shape]
        for _, blocks in self.blocks:
            for block in blocks:
                for dim, ends in enumerate(block):
                    edges[dim].update(ends)
        return [list(itertools.pairwise(sorted(found))) for found in edges]

    @cached_property
    def cut(self) -> list[int]:
        """The dims that are cut."""
        return [dim for dim, found in enumerate(self.ranges) if len(found) > 1]

    @cached_property
    def holders(self) -> dict[Cell, list[int]]:
        """The ranks that hold each cell of the dims that are cut."""
        cells = itertools.product(*(self.ranges[dim] for dim in self.cut))
        return {cell: [rank for rank, blocks in self.blocks if any(self._covers(block, cell) for block in blocks)] for cell in cells}

    def _covers(self, block: Sequence[Range], cell: Cell) -> bool:
        return all(block[dim][0] <= a and b <= block[dim][1] for dim, (a, b) in zip(self.cut, cell, strict=True))

    @property
    def _empty(self) -> list[int]:
        return [rank for rank, blocks in self.blocks if not blocks]

    def _head(self) -> str:
        words = layout_words(str(self.layout), self.mesh.axis_names)
        return f"{shape_text(self.shape)} on {self.mesh}: {words}"

    def _notes(self) -> list[str]:
        axes = [(axis, p) for axis, p in zip(self.mesh.axis_names, self.layout, strict=True) if isinstance(p, Partial)]
        notes = [f"the ranks along {axis} hold the rows of their own experts" for axis, p in axes if on_experts(p)]
        notes += [
            f"the ranks along {axis} hold different values, whose {p.reduce_op} is the tensor" for axis, p in axes if not on_experts(p)
        ]
        return notes + ([f"{_ranks(self._empty)}: nothing, there are fewer parts than ranks"] if self._empty else [])

    def _grids(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """(title, column headers, rows): rows are the first dim that is cut, columns the second, and there is a grid for each part of the
        others."""
        first, others = self.cut[:2], self.cut[2:]
        down = self.ranges[first[0]]
        across = self.ranges[first[1]] if len(first) > 1 else [None]
        for rest in itertools.product(*(self.ranges[dim] for dim in others)):
            title = ", ".join(f"dim {dim}: {_span(at)}" for dim, at in zip(others, rest, strict=True))
            columns = [f"dim {first[1]}: {_span(at)}" if at is not None else "" for at in across]
            rows = [
                [f"dim {first[0]}: {_span(a)}", *(_ranks(self.holders[(a, *((b,) if b else ()), *rest)]) for b in across)] for a in down
            ]
            yield title, columns, rows

    def __str__(self) -> str:
        if not self.cut:
            return "\n".join([self._head(), f"all {self.mesh.size} ranks hold all of it", *self._notes()])
        parts = [self._head()]
        for title, columns, rows in self._grids():
            parts.append(f"{title}\n{tabulate(rows, headers=['', *columns], tablefmt='grid')}".strip())
        return "\n".join([*parts, *self._notes()])

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._head())}</p>"]
        if not self.cut:
            parts.append(f"<p>all {self.mesh.size} ranks hold all of it</p>")
        for title, columns, rows in self._grids() if self.cut else ():
            parts.append(f"<p>{html.escape(title)}</p>{tabulate(rows, headers=['', *columns], tablefmt='html')}")
        return "".join([*parts, *(f"<p>{html.escape(note)}</p>" for note in self._notes())])


def _span(ends: Range) -> str:
    return f"{ends[0]}-{ends[1] - 1}" if ends[1] - ends[0] > 1 else str(ends[0])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(number_runs(ranks))}"
