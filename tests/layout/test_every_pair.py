"""Every pair of layouts, run rank by rank against whole tensors: a fixed sample here, all with ``-m slow``."""

from __future__ import annotations

import pytest

from fxshard.layout.layouts import REDUCE_OPS, all_layouts
from fxshard.mesh.mesh import parse_mesh
from tests.moved import pairs, run_pairs

PAIRS_A_CASE = 160
"""How many pairs of each case the fixed sample has."""

SUMS = [
    ("a=4", (8, 4)),
    ("a=4", (6, 3)),
    ("a=4", (5, 2, 3)),
    ("a=4", ()),
    ("a=2,b=2", (4,)),
    ("a=2,b=2", (8, 4)),
    ("a=2,b=2", (5, 3)),
    ("a=2,b=2", (3, 2, 5)),
    ("a=2,b=3", (6, 12)),
    ("a=2,b=3", (7, 5)),
    ("a=3,b=2", (4, 1)),
    ("a=2,b=3", (6, 0)),
    ("a=2,b=2,c=2", (8, 8)),
    ("a=2,b=2,c=2", (9, 3)),
    ("a=2,b=2,c=2", (4, 6, 5)),
]
KINDS = [("a=4", (8, 4)), ("a=4", (5, 3)), ("a=2,b=2", (4, 6)), ("a=2,b=3", (7, 2)), ("a=2,b=2,c=2", (5,))]


@pytest.mark.parametrize(("axes", "shape"), SUMS)
def test_a_sample_of_all_pairs(axes: str, shape: tuple[int, ...]) -> None:
    mesh = parse_mesh(axes)
    run_pairs(pairs(all_layouts(len(shape), mesh.shape), PAIRS_A_CASE), shape, mesh)


@pytest.mark.parametrize(("axes", "shape"), KINDS)
def test_a_sample_of_all_reductions(axes: str, shape: tuple[int, ...]) -> None:
    """These include pairs of different kinds of pending values."""
    mesh = parse_mesh(axes)
    run_pairs(pairs(all_layouts(len(shape), mesh.shape, REDUCE_OPS), PAIRS_A_CASE), shape, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape"), SUMS)
def test_all_pairs(axes: str, shape: tuple[int, ...]) -> None:
    mesh = parse_mesh(axes)
    run_pairs(pairs(all_layouts(len(shape), mesh.shape)), shape, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "shape"), KINDS)
def test_all_reductions(axes: str, shape: tuple[int, ...]) -> None:
    mesh = parse_mesh(axes)
    run_pairs(pairs(all_layouts(len(shape), mesh.shape, REDUCE_OPS)), shape, mesh)
