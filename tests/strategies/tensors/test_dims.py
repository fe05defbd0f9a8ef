"""Dims that are reordered, added, dropped or repeated."""

import pytest

from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh


def test_permute_and_transpose() -> None:
    assert {"S(0) -> S(1)", "S(1) -> S(2)", "S(2) -> S(0)"} <= check("aten.permute.default", real(2, 3, 5), [2, 0, 1])
    assert {"S(0) -> S(2)", "S(2) -> S(0)"} <= check("aten.transpose.int", real(2, 3, 5), 0, -1)
    assert {"S(0) -> S(1)", "S(1) -> S(0)"} <= check("aten.t.default", real(3, 5))
    check("aten.t.default", real(3))


def test_unsqueeze() -> None:
    assert "S(1) -> S(2)" in check("aten.unsqueeze.default", real(3, 5), 1)
    assert "S(1) -> S(1)" in check("aten.unsqueeze.default", real(3, 5), -1)


def test_squeeze_drops_the_dims_that_it_drops_unsharded() -> None:
    """On 4 ranks a shard of 4 rows has size 1 in that dim, which must stay."""
    assert {"S(0) -> S(0)", "S(2) -> S(1)"} <= check("aten.squeeze.default", real(4, 1, 3))
    assert "S(0) -> S(0)" in check("aten.squeeze.dim", real(4, 1, 3), 0)
    assert "S(2) -> S(0)" in check("aten.squeeze.dims", real(1, 1, 4), [0, 1, 2])


def test_expanded_dims_can_be_sharded() -> None:
    specs = check("aten.expand.default", real(1, 4), [3, -1, 4])
    assert specs >= {"R -> S(0)", "S(1) -> S(2)"}
    assert "R -> S(1)" in check("aten.expand.default", real(2, 1, 4), [2, 5, 4])


def test_expand_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("aten.expand.default", (real(1, 4), [5, 4]), mesh=(2, 2))}
    assert {"RS(1) -> S(0)S(1)", "RR -> S(0)S(0)"} <= specs


def test_repeat() -> None:
    assert {"S(0) -> S(0)", "R -> S(1)"} <= check("aten.repeat.default", real(3, 2), [1, 4])
    assert {"R -> S(0)", "S(0) -> S(1)"} <= check("aten.repeat.default", real(5), [3, 1])
    assert "R -> S(0)" in check("aten.repeat.default", real(1, 3), [4, 1])


def test_repeat_interleave_keeps_neighbours_together() -> None:
    assert "S(1) -> S(1)" in check("aten.repeat_interleave.self_int", real(2, 4), 3, 1)
    check("aten.repeat_interleave.self_int", real(2, 4), 3)


@pytest.mark.parametrize(
    ("op", "args", "free"),
    [("flip", ([0],), 1), ("roll", ([1], [0]), 1)],
)
def test_dims_whose_elements_move_are_not_sharded(op: str, args: tuple[object, ...], free: int | None) -> None:
    specs = {s for s in check(f"aten.{op}.default", real(4, 5), *args) if "S" in s}
    assert specs == (set() if free is None else {f"S({free}) -> S({free})"})


def test_roll_of_the_flattened_tensor_is_not_sharded() -> None:
    assert not any("S" in s for s in check("aten.roll.default", real(4, 5), [3]))


@pytest.mark.parametrize("diagonal", [-2, 0, 1])
@pytest.mark.parametrize("op", ["tril", "triu"])
def test_triangles(op: str, diagonal: int) -> None:
    """Rows and columns can be sharded; the diagonal is that of the whole matrix."""
    specs = check(f"aten.{op}.default", real(4, 5), diagonal)
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= specs
    check_mesh(f"aten.{op}.default", (real(3, 5, 4), diagonal))


def test_complex_parts() -> None:
    import torch

    z = torch.view_as_complex(real(4, 3, 2))
    assert "S(0) -> S(0)" in check("aten.view_as_real.default", z)
    assert {s for s in check("aten.view_as_complex.default", real(4, 2)) if "S" in s} == {"S(0) -> S(0)"}
    assert "P -> P" in check("aten._conj.default", z)
