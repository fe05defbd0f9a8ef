"""Index tensors: reading, writing, adding."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.samples import real, whole, yes_no
from tests.strategies.shards import check, check_mesh


def test_index_select_and_index_add() -> None:
    assert {"R, S(0) -> S(0)", "S(1), R -> S(1)", "P(max), R -> P(max)"} <= check("aten.index_select.default", real(6, 4), 0, whole(6, 5))
    specs = check("aten.index_add.default", real(6, 4), 0, whole(6, 5), real(5, 4), alpha=2)
    assert {"P, S(0), S(0) -> P", "S(1), R, S(1) -> S(1)", "P, R, P -> P"} <= specs


def test_gather() -> None:
    assert {"R, S(1) -> S(1)", "S(0), S(0) -> S(0)"} <= check("aten.gather.default", real(5, 4), 1, whole(4, 5, 3))
    specs = check("aten.gather.default", real(5, 4), 1, whole(4, 2, 3))
    assert not any(s.startswith("S(0)") for s in specs)


def test_scatter_add() -> None:
    specs = check("aten.scatter_add.default", real(5, 4), 1, whole(4, 5, 3), real(5, 3))
    assert {"S(0), S(0), S(0) -> S(0)", "P, S(1), S(1) -> P", "P, R, P -> P"} <= specs
    check("aten.scatter_add.default", real(5, 4), 1, whole(4, 5, 3), real(6, 7))
    check("aten.scatter_add.default", real(5, 4), 0, whole(5, 3, 4), real(3, 4))


def test_scatter() -> None:
    index = torch.tensor([[0, 2], [1, 3], [3, 0], [2, 1], [0, 1]])
    specs = check("aten.scatter.src", real(5, 4), 1, index, real(5, 2))
    assert {"S(0), S(0), S(0) -> S(0)", "P, R, P -> P"} <= specs
    assert not any(s.startswith("P, S(1)") for s in specs)
    assert "P, R -> P" in check("aten.scatter.value", real(5, 4), 1, index, 0)
    assert "P, R -> P" not in check("aten.scatter.value", real(5, 4), 1, index, 2.5)
    check("aten.scatter_reduce.two", real(5, 4), 1, index, real(5, 2), "amax")


@pytest.mark.parametrize("where", [0, 1, 2])
def test_index_with_one_tensor(where: int) -> None:
    indices = [None] * where + [whole(3, 2, 5)]
    specs = check("aten.index.Tensor", real(3, 4, 6), indices)
    assert {f"R, S(0) -> S({where})", f"R, S(1) -> S({where + 1})"} <= specs


def test_index_with_several_tensors() -> None:
    assert "S(2), R, R -> S(1)" in check("aten.index.Tensor", real(3, 4, 6), [whole(3, 5), whole(4, 5)])
    assert "S(1), R, R -> S(2)" in check("aten.index.Tensor", real(3, 4, 6), [whole(3, 2, 5), None, whole(6, 5)])
    assert "S(0), R, R -> S(0)" in check("aten.index.Tensor", real(3, 4, 6), [None, whole(4, 5, 1), whole(6, 2)])


def test_a_boolean_index_is_replicated() -> None:
    assert check("aten.index.Tensor", real(5, 3), [yes_no(5)]) == {"R, R -> R"}


def test_index_put() -> None:
    place = torch.tensor([4, 0, 2])
    specs = check("aten.index_put.default", real(5, 3), [place], real(3, 3))
    assert "S(1), R, S(1) -> S(1)" in specs
    assert not any("S(0)" in s for s in specs)
    specs = check("aten.index_put.default", real(5, 3), [whole(5, 4)], real(4, 3), True)
    assert {"P, S(0), S(0) -> P", "P, R, P -> P"} <= specs
    check("aten.index_put.default", real(5, 3), [whole(5, 4)], real(3), True)


def test_index_put_on_a_mesh() -> None:
    check_mesh("aten.index_put.default", (real(5, 3), [whole(5, 4)], real(4, 3), True), mesh=(2, 2))


def test_bucketize() -> None:
    edges = torch.linspace(-1, 1, 5, dtype=torch.float64)
    assert "S(0), R -> S(0)" in check("aten.bucketize.Tensor", real(5, 3), edges)
    assert "R, S(0) -> S(0)" in check("aten.searchsorted.Tensor", edges, real(5, 3))
    assert "S(0), S(0) -> S(0)" in check("aten.searchsorted.Tensor", real(5, 3).sort()[0], real(5, 4))
