"""Packed dims: their text, shards and blocks, and every way to and from them, run rank by rank against whole tensors."""

from __future__ import annotations

import pickle

import pytest
import torch

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.errors import LayoutError
from fxshard.layout.layouts import Layout, all_layouts, local_blocks, local_shape
from fxshard.layout.redistribution import is_legal, single_step, steps
from fxshard.mesh.mesh import Mesh, parse_mesh
from tests.moved import pairs, run_pairs
from tests.reference_shards import coordinates, shard

CASES = [
    ("a=2", (16, 3), PackedShard(0, (8, 4, 4))),
    ("a=4", (3, 15), PackedShard(1, (7, 5, 3))),
    ("a=3", (9,), PackedShard(0, (3, 3, 3))),
    ("a=2,b=2", (12, 5), PackedShard(0, (6, 3, 3))),
    ("a=2,b=3", (5, 10), PackedShard(1, (2, 8))),
    ("a=20", (44,), PackedShard(0, (40, 4))),
]


@pytest.mark.parametrize(("axes", "shape", "packed"), CASES)
def test_every_pair_of_layouts(axes: str, shape: tuple[int, ...], packed: PackedShard) -> None:
    mesh = parse_mesh(axes)
    layouts = all_layouts(len(shape), mesh.shape, packed=(packed,))
    assert sum(layout.packed != () for layout in layouts) >= mesh.ndim
    run_pairs(pairs(layouts, 300), shape, mesh)


@pytest.mark.parametrize(("axes", "shape", "packed"), CASES)
def test_shards_and_blocks(axes: str, shape: tuple[int, ...], packed: PackedShard) -> None:
    mesh = parse_mesh(axes)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for layout in (one for one in all_layouts(len(shape), mesh.shape, (), (packed,)) if one.packed):
        for coordinate in coordinates(mesh.shape):
            want = shard(whole, layout, mesh.shape, coordinate)
            assert local_shape(shape, layout, mesh.shape, coordinate) == tuple(want.shape)
            have = torch.empty_like(want)
            for block in local_blocks(shape, layout, mesh.shape, coordinate):
                have[block.here] = whole[block.there]
            assert torch.equal(have, want)


def test_text_and_pickles() -> None:
    layout = Layout.parse("S(1)S(0:8+4+4)")
    assert layout == Layout((*Layout.parse("S(1)"), PackedShard(0, (8, 4, 4)))) and str(layout) == "S(1)S(0:8+4+4)"
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert str(Layout.parse("RS(0:packed)")) == "RS(0:packed)"
    assert len({PackedShard(0, (8, 4, 4)), PackedShard(0, (8, 8)), PackedShard(1, (8, 8)), PackedShard(0, (8, 8))}) == 3
    for text in ("S(0:8)", "S(0:8,8)", "S(0:)", "S(0:8+)"):
        with pytest.raises(LayoutError, match="cannot read layout"):
            Layout.parse(text)


def test_only_one_axis_shards_a_packed_dim() -> None:
    packed = PackedShard(0, (8, 8))
    assert all(len(layout.held_on(0)) == 1 for layout in all_layouts(2, (2, 2, 2), packed=(packed,)) if layout.packed)
    for source, target in (("S(0)R", packed), ("S(0:8+8)R", Layout.parse("S(0)")[0])):
        step = single_step(1, Layout.parse("R")[0], target)
        assert step is not None and not is_legal(step, Layout.parse(source))
    assert single_step(0, packed, Layout.parse("S(1)")[0]) is None


def test_ways_lead_through_whole_or_pending_values() -> None:
    mesh = Mesh({"a": 4})

    def way(source: str, target: str) -> list[str]:
        return [step.kind for step in steps(Layout.parse(source), Layout.parse(target), (16, 8), 4, mesh)]

    assert way("S(0:8+8)", "R") == ["all_gather"] and way("P", "S(0:8+8)") == ["reduce_scatter"] and way("R", "S(0:8+8)") == ["slice"]
    assert way("S(0:8+8)", "S(0)") == ["all_gather", "slice"] == way("S(1)", "S(0:8+8)")
    assert way("S(0:8+8)", "S(0:4+12)") == ["all_gather", "slice"]
