"""Embeddings sharded by rows and by columns."""

import pytest
import torch

from tests.strategies.samples import real, whole
from tests.strategies.shards import check, check_mesh


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_embedding(shape: tuple[int, ...]) -> None:
    specs = check("aten.embedding.default", real(7, 5), whole(7, *shape))
    assert {"S(0), R -> P", f"S(1), R -> S({len(shape)})", "P, R -> P"} <= specs


def test_rows_with_infinities_do_not_leak() -> None:
    weight = real(6, 2)
    weight[0] = torch.inf
    check("aten.embedding.default", weight, torch.tensor([1, 5, 3]))


@pytest.mark.parametrize("padding", [-1, 0, 3])
@pytest.mark.parametrize("by_frequency", [True, False])
def test_embedding_backward(padding: int, by_frequency: bool) -> None:
    index = torch.tensor([[1, 3, 3], [6, 0, 1]])
    specs = check("aten.embedding_dense_backward.default", real(2, 3, 5), index, 7, padding, by_frequency)
    assert {"R, R -> S(0)", "S(2), R -> S(1)", "P, R -> P"} <= specs
    assert ("S(0), S(0) -> P" in specs) == (not by_frequency)


def test_embedding_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("aten.embedding.default", (real(7, 5), whole(7, 3)), mesh=(2, 2))}
    assert {"S(0)S(0), RR -> PP", "S(0)R, RS(0) -> PS(0)", "S(0)S(1), RR -> PS(1)"} <= specs


def test_embedding_backward_on_a_mesh() -> None:
    args = (real(4, 5), whole(7, 4), 7, 2, False)
    specs = {str(s) for s in check_mesh("aten.embedding_dense_backward.default", args, mesh=(2, 3))}
    assert "S(0)R, S(0)R -> PS(0)" in specs
