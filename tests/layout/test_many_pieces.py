"""Redistributions among more than 16 ranks, where one operation cuts or joins all chunks, compared with whole tensors."""

from __future__ import annotations

import pytest

from fxshard.layout.layouts import all_layouts
from fxshard.mesh.mesh import Mesh
from tests.moved import pairs, run_pairs


@pytest.mark.parametrize("shape", [(36, 18), (37, 20), (5, 1), (0, 19)], ids=str)
def test_on_one_axis(shape: tuple[int, ...]) -> None:
    run_pairs(pairs(all_layouts(2, (2,), ("sum", "max"))), shape, Mesh({"a": 18}))


@pytest.mark.parametrize("shape", [(40, 6), (41, 7), (22, 0)], ids=str)
def test_on_two_axes(shape: tuple[int, ...]) -> None:
    """These include nested chunks."""
    run_pairs(pairs(all_layouts(2, (2, 2)), most=60), shape, Mesh({"a": 4, "b": 5}))
