"""Layouts against torch.chunk and DTensor; the notation; errors that name the fault and the remedy."""

from __future__ import annotations

import copy
import itertools
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensor_extent

from fxshard.errors import LayoutError
from fxshard.layout.layouts import (
    Layout,
    all_layouts,
    ceil_shape,
    check_layout,
    chunk,
    chunk_lengths,
    local_offset,
    local_shape,
    normalised_placement,
)
from tests.reference_shards import coordinates, shard

L = Layout.parse
OPS = ("sum", "avg", "max", "min", "product")


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Layout]:
    """(shape, mesh shape, layout): several axes on one dim, uneven and empty shards."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    one = st.sampled_from([Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))])
    return shape, mesh, Layout(draw(st.lists(one, min_size=len(mesh), max_size=len(mesh))))


@given(st.integers(0, 60), st.integers(1, 9))
def test_chunks_are_torchs(size: int, parts: int) -> None:
    pieces = torch.arange(size).chunk(parts)
    lengths = [len(p) for p in pieces] + [0] * (parts - len(pieces))
    assert list(chunk_lengths(size, parts)) == lengths
    offsets = list(itertools.accumulate(lengths, initial=0))[:-1]
    assert [chunk(size, parts, i)[0] for i in range(parts)] == offsets


@given(cases())
@example(((7,), (2, 2), L("S(0)S(0)")))
@example(((3, 1), (2, 3, 2), L("S(0)RS(0)")))
def test_local_shapes_and_offsets_are_nested_chunks(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, mesh, layout = case
    places = torch.cartesian_prod(*(torch.arange(s) for s in shape)).reshape(*shape, len(shape))
    for c in coordinates(mesh):
        mine = shard(places, layout, mesh, c)
        assert local_shape(shape, layout, mesh, c) == tuple(mine.shape[:-1])
        if mine.numel():
            assert local_offset(shape, layout, mesh, c) == tuple(mine.reshape(-1, len(shape))[0].tolist())


@given(cases())
def test_local_shapes_and_offsets_are_dtensors(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, mesh, layout = case
    for c in coordinates(mesh):
        size, offset = dtensor_extent(shape, mesh, list(c), layout)
        assert local_shape(shape, layout, mesh, c) == tuple(size)
        if 0 not in size:
            assert local_offset(shape, layout, mesh, c) == tuple(offset)


@given(cases())
def test_shards_cover_the_tensor_once_and_none_is_larger_than_the_ceil_shape(case: tuple[tuple[int, ...], tuple[int, ...], Layout]) -> None:
    shape, mesh, layout = case
    count = torch.zeros(shape, dtype=torch.int64)
    shapes = {local_shape(shape, layout, mesh, c) for c in coordinates(mesh)}
    for c in coordinates(mesh):
        mine = local_shape(shape, layout, mesh, c)
        count[tuple(slice(o, o + n) for o, n in zip(local_offset(shape, layout, mesh, c), mine, strict=True))] += 1
    replicas = torch.tensor([n for p, n in zip(layout, mesh, strict=True) if not isinstance(p, Shard)]).prod() if mesh else 1
    assert (count == int(replicas)).all()
    assert ceil_shape(shape, layout, mesh) == tuple(max(sizes) for sizes in zip(*shapes, strict=True))


@given(st.lists(st.sampled_from(["R", "P", "S(0)", "S(12)", "S(-1)", *(f"P({op})" for op in OPS[1:])]), min_size=1, max_size=4))
def test_notation_roundtrip(tokens: list[str]) -> None:
    text = "".join(tokens)
    assert str(L(text)) == text
    assert len(L(text)) == len(tokens)
    assert L(str(L(text))) == L(text) and hash(L(str(L(text)))) == hash(L(text))


def test_notation_means_torchs_placements() -> None:
    assert L("RS(1)PP(avg)") == (Replicate(), Shard(1), Partial("sum"), Partial("avg"))
    assert str(L("P(sum)")) == "P"
    assert repr(L("RS(0)")) == "Layout('RS(0)')"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("R S(0)", "position 1"),
        ("S0", "'S0'"),
        ("RX", "position 1"),
        ("S()", "'S()'"),
        ("S(" + "9" * 5000 + ")", "position 0"),
        ("P(mean)", "'mean'"),
        ("R,R", "position 1"),
    ],
)
def test_invalid_notation_is_named(text: str, named: str) -> None:
    with pytest.raises(LayoutError) as error:
        L(text)
    assert named in error.value.what
    assert error.value.remedy


def test_wrong_length_and_dims_out_of_range_are_named() -> None:
    with pytest.raises(LayoutError, match=r"layout RR of w has 2 placements, the mesh has 1 axes[\s\S]*one placement per mesh axis"):
        check_layout(L("RR"), 1, 1, "w")
    with pytest.raises(LayoutError, match=r"dim 2 in S\(2\) is out of range for w, which has 2 dims[\s\S]*0 to 1"):
        check_layout(L("RS(2)"), 2, 2, "w")
    with pytest.raises(LayoutError, match=r"dim -3"):
        check_layout(L("S(-3)"), 2, 1, "w")
    with pytest.raises(LayoutError, match=r"dim 0[\s\S]*a scalar can only be replicated"):
        normalised_placement(Shard(0), 0, "loss")


def test_negative_dims_count_from_the_end() -> None:
    assert check_layout(L("S(-1)R"), 3, 2, "x") == L("S(2)R")


def test_all_layouts_is_complete_and_starts_with_replicated() -> None:
    found = all_layouts(2, (2, 2), ("sum", "max"))
    assert found[0].is_replicated and len(found) == len(set(found)) == 5**2
    assert sum(layout.has_partial for layout in found) == 25 - 9
    assert all_layouts(0, (2,), ()) == [L("R")]
    assert L("S(0)RS(0)").axes_on(0) == (0, 2) and L("S(0)RS(0)").axes_on(1) == ()


def test_the_cached_hash_is_that_of_the_tuple_and_is_not_copied() -> None:
    layout, other = L("S(0)P"), L("S(0)P")
    assert hash(layout) == hash(layout) == hash(tuple(layout)) == hash(other)
    for copied in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert copied == layout and not vars(copied) and hash(copied) == hash(layout)
