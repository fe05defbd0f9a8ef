"""``fxshard.visualize``: which rank holds what, compared with torch.chunk; golden drawings; what cannot be drawn."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given, settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fxshard
from fxshard.errors import LayoutError, OptionError
from fxshard.layout.layouts import Layout
from tests.plans.small_plans import layouts, small_plan
from tests.programs import small_program
from tests.reference_shards import coordinates, shard

MESH = fxshard.Mesh({"dp": 2, "tp": 3})


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3).flatmap(lambda shape: st.tuples(st.just(tuple(shape)), layouts(tuple(shape), MESH)))
)
@settings(max_examples=60, deadline=None)
def test_the_holders_of_any_element_are_those_of_torch_chunk(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    picture = fxshard.visualize(layout, shape, MESH)
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    held = {MESH.rank(at): set(shard(index, layout, MESH.shape, at).flatten().tolist()) for at in coordinates(MESH.shape)}
    for cell, ranks in picture.holders.items():
        spans = dict(zip(picture.cut, cell, strict=True))
        part = index[tuple(slice(*spans[dim]) if dim in spans else slice(None) for dim in range(len(shape)))]
        for element in part.flatten().tolist():
            assert {rank for rank, own in held.items() if element in own} == set(ranks)


def test_drawings() -> None:
    assert_expected_inline(
        str(fxshard.visualize("S(0)S(1)", (5, 6), MESH)),
        """\
5x6 on dp=2,tp=3: S(0) on dp, S(1) on tp
+------------+--------------+--------------+--------------+
|            | dim 1: 0-1   | dim 1: 2-3   | dim 1: 4-5   |
+============+==============+==============+==============+
| dim 0: 0-2 | rank 0       | rank 1       | rank 2       |
+------------+--------------+--------------+--------------+
| dim 0: 3-4 | rank 3       | rank 4       | rank 5       |
+------------+--------------+--------------+--------------+""",
    )
    assert_expected_inline(
        str(fxshard.visualize("S(0:4+2)P", (6, 4), {"dp": 2, "tp": 2})),
        """\
6x4 on dp=2,tp=2: S(0:4+2) on dp, P on tp
+------------+-----------+
|            |           |
+============+===========+
| dim 0: 0-1 | ranks 0-1 |
+------------+-----------+
| dim 0: 2-3 | ranks 2-3 |
+------------+-----------+
| dim 0: 4   | ranks 0-1 |
+------------+-----------+
| dim 0: 5   | ranks 2-3 |
+------------+-----------+
the ranks along tp hold different values, whose sum is the tensor""",
    )
    assert_expected_inline(
        str(fxshard.visualize([Replicate(), Replicate()], (4,), MESH)),
        """\
4 on dp=2,tp=3: whole
all 6 ranks hold all of it""",
    )


def test_a_notebook_says_of_a_partial_what_the_text_says() -> None:
    """No dim is cut, and still no rank holds the tensor."""
    note = "the ranks along dp hold different values, whose sum is the tensor"
    picture = fxshard.visualize("PR", (4,), MESH)
    assert note in str(picture) and note in picture._repr_html_()
    assert "hold all of it" in fxshard.visualize("RR", (4,), MESH)._repr_html_()


def test_three_dims_are_a_grid_for_each_part_of_the_third() -> None:
    said = str(fxshard.visualize("S(0)S(1)S(2)", (2, 2, 2), {"a": 2, "b": 2, "c": 2}))
    titles = [line for line in said.splitlines() if line.startswith("dim 2: ")]
    assert titles == ["dim 2: 0", "dim 2: 1"] and "rank 7" in said


def test_a_dtensor_draws_itself(tmp_path: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        tensor = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), [Shard(0), Replicate()])
        assert str(fxshard.visualize(tensor)).startswith("4x2 on dp=1,tp=1: S(0) on dp")
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(OptionError, match="does not say which block"):
        fxshard.visualize("S(0)R")
    with pytest.raises(OptionError, match="has no layout to draw"):
        fxshard.visualize(3)
    with pytest.raises(LayoutError, match="out of range"):
        fxshard.visualize("S(2)R", (4, 4), MESH)


def test_a_notebook_says_that_a_pending_value_differs() -> None:
    picture = fxshard.visualize("PR", (4,), {"dp": 2, "tp": 2})
    note = "the ranks along dp hold different values, whose sum is the tensor"
    assert note in str(picture) and f"<p>{note}</p>" in picture._repr_html_()


def test_notebooks_show_plans_programs_and_layouts() -> None:
    for shown in (small_plan(), small_program(5)):
        said = shown._repr_html_()
        assert "proven optimal" in said and "all 4 nodes" in said and said.count("<pre>") == said.count("</pre>")
    assert "<code>S(0)</code>" in Layout.parse("RS(0)")._repr_html_()
    assert "rank 5" in fxshard.visualize("S(0)S(1)", (4, 6), MESH)._repr_html_()
