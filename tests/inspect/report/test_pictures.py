"""Which rank holds which block, against DTensor's local shapes and offsets, and against the indices of a cut tensor for packed dims."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor_extent

from fxshard.inspect.report.pictures import Pieces, cuts_of
from fxshard.layout.layouts import Layout
from tests.reference_shards import coordinates, shard


def held(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...], place: tuple[int, ...]) -> list[Pieces]:
    """The pieces of each dim on one rank, read from the picture as the page reads it: the last axis of a cut is the fastest."""
    found: list[Pieces] = [((0, size),) for size in shape]
    for cut in cuts_of(shape, layout, mesh) or ():
        index = 0
        for axis in cut.axes:
            index = index * mesh[axis] + place[axis]
        found[cut.dim] = cut.pieces[index]
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Layout]:
    """(shape, mesh shape, layout): up to three dims and axes, several axes on one dim, uneven and empty shards."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    one = st.sampled_from([Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))])
    return shape, mesh, Layout(draw(st.lists(one, min_size=len(mesh), max_size=len(mesh))))


@given(cases())
def test_blocks_are_dtensors(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, mesh, layout = case
    for place in itertools.product(*map(range, mesh)):
        local, offset = dtensor_extent(shape, mesh, list(place), list(layout))
        for dim, pieces in enumerate(held(shape, layout, mesh, place)):
            assert len(pieces) == 1 and pieces[0][1] == local[dim]
            assert not local[dim] or pieces[0][0] == offset[dim]


def test_parts_of_a_packed_dim() -> None:
    layout, mesh, whole = Layout.parse("S(1)S(0:8+4+4)"), (2, 4), torch.arange(16 * 6).reshape(16, 6)
    for place in coordinates(mesh):
        rows, columns = held((16, 6), layout, mesh, place)
        assert len(rows) == 3
        cut = torch.cat([whole[start : start + length] for start, length in rows])
        [(start, length)] = columns
        assert torch.equal(cut[:, start : start + length], shard(whole, layout, mesh, place))


def test_what_the_layout_does_not_tell() -> None:
    assert cuts_of((-1, 4), Layout.parse("S(1)"), (2,)) is None
    assert cuts_of((8, 2, 4), Layout.parse("P(experts)"), (2,)) is None
    assert cuts_of((), Layout.parse("RP"), (2, 2)) == ()
