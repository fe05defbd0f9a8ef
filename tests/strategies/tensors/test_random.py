"""Dropout and draws are the same on every mesh; other random operators are replicated with a reason."""

import pytest
import torch

from fxshard.mesh.mesh import Mesh
from fxshard.strategies import op_strategy
from tests.strategies.samples import real, yes_no
from tests.strategies.shards import call_for, check, check_mesh

SEED = torch.tensor(1234)


def test_dropout_draws_one_mask_on_any_number_of_ranks() -> None:
    specs = check("fxshard.dropout.default", real(5, 3), 0.4, SEED, 7)
    assert specs == {"R, R -> R, R", "S(0), R -> S(0), S(0)", "S(1), R -> S(1), S(1)"}


def test_dropout_on_a_mesh() -> None:
    check_mesh("fxshard.dropout.default", (real(5, 7), 0.4, SEED, 7), mesh=(2, 3))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_shards_of_a_draw_are_parts_of_one_draw(kind: str) -> None:
    args = (kind, 0, 0, [5, 7], torch.float64, SEED, 3)
    assert check("fxshard.random.default", *args) == {"R -> R", "R -> S(0)", "R -> S(1)"}
    check_mesh("fxshard.random.default", args, mesh=(2, 3))


def test_integers_and_permutations_are_parts_of_one_draw() -> None:
    check("fxshard.random.default", "integers", -4, 9, [5, 3], torch.int64, SEED, 3)
    check("fxshard.random.default", "permutation", 0, 0, [7], torch.int64, SEED, 3)


def test_constants_are_replicated() -> None:
    assert check("fxshard.constant.default", [1.5, 2, 3], [3], torch.float64) == {" -> R"}


def test_dropout_backward_is_linear_in_the_gradient() -> None:
    assert "P, R -> P" in check("fxshard.dropout_backward.default", real(5, 3), yes_no(5, 3), 0.4)


def test_other_random_operators_are_replicated_with_a_reason() -> None:
    call, _ = call_for("aten.bernoulli.default", (real(4),), {}, (real(4),))
    strategy = op_strategy(call, Mesh({"dp": 2}))
    assert [str(s) for s in strategy.specs] == ["R -> R"]
    assert "random" in strategy.reason
    assert not strategy.fallback
