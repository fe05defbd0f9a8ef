"""Views that split and merge dims; hypothesis finds the shapes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxshard.strategies.tensors.views import refine
from tests.strategies.samples import real
from tests.strategies.shards import check, check_mesh


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ((4, 6), (24,), {"S(0) -> S(0)"}),
        ((24,), (4, 6), {"S(0) -> S(0)"}),
        ((4, 6), (4, 2, 3), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        ((2, 3, 4), (6, 4), {"S(0) -> S(0)", "S(2) -> S(1)"}),
        ((4, 6), (8, 3), {"S(0) -> S(0)"}),
        ((6, 4), (4, 6), {"S(0) -> S(0)"}),
        ((5,), (1, 5, 1), {"S(0) -> S(1)"}),
        ((1, 5, 1, 3), (5, 3), {"S(1) -> S(0)", "S(3) -> S(1)"}),
        ((3, 5), (5, 3), set()),
        ((2, 3, 5, 4), (2, 5, 3, 4), {"S(0) -> S(0)", "S(3) -> S(3)"}),
        ((1, 1), (1,), set()),
        ((1,), (), set()),
        ((0, 3), (3, 0), set()),
    ],
)
def test_view(source: tuple[int, ...], target: tuple[int, ...], kept: set[str]) -> None:
    specs = check("aten.view.default", real(*source), list(target))
    assert {s for s in specs if "S" in s} == kept


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_view(shape: list[int], random: object) -> None:
    target = _other_shape(math.prod(shape), random)
    check("aten.view.default", real(*shape), target)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_views_on_two_axes(shape: list[int], random: object) -> None:
    check_mesh("aten.reshape.default", (real(*shape), _other_shape(math.prod(shape), random)), mesh=(2, 3))


@given(st.lists(st.integers(1, 12), max_size=5), st.randoms(use_true_random=False))
def test_refined_factors_multiply_to_the_dims(shape: list[int], random: object) -> None:
    target = _other_shape(math.prod(shape), random)
    ins, outs, sizes = refine(shape, target)
    for names, dims in ((ins, shape), (outs, target)):
        for dim, size in zip(names, dims, strict=True):
            known = math.prod(sizes[n] for n in dim if n in sizes)
            rest = [n for n in dim if n not in sizes]
            assert all(n.endswith("!") for n in rest) and len(rest) <= 1
            assert size % known == 0 if rest else known == size


def _other_shape(numel: int, random: object) -> list[int]:
    """A random factorisation of ``numel``, with some ones."""
    shape = []
    while numel > 1 and len(shape) < 5:
        divisor = random.choice([d for d in range(1, numel + 1) if numel % d == 0])
        shape.append(divisor)
        numel //= divisor
    return [*shape, numel]


def test_an_uneven_merge_is_not_offered_if_its_shards_differ() -> None:
    heads = (real(2, 5, 6), [2, 30])
    assert "S(1) -> S(1)" not in {str(s) for s in check_mesh("aten.view.default", heads, mesh=(4,))}
    assert "S(1) -> S(1)" in {str(s) for s in check_mesh("aten.view.default", heads, mesh=(5,))}
    eight = (real(2, 8, 6), [2, 48])
    assert "S(1) -> S(1)" in {str(s) for s in check_mesh("aten.view.default", eight, mesh=(4,))}


def test_flatten_unflatten_and_minus_one() -> None:
    assert "S(1) -> S(1)" in check("aten.flatten.using_ints", real(2, 4, 3), 1, 2)
    assert "S(0) -> S(0)" in check("aten.unflatten.int", real(4, 6), 1, [2, -1])
    assert "S(0) -> S(0)" in check("aten.view.default", real(4, 6), [4, -1, 2])
    assert "S(0) -> S(0)" in check("aten._unsafe_view.default", real(4, 6), [24])


def test_views_pass_every_pending_reduction() -> None:
    specs = check("aten.view.default", real(4, 6), [24])
    assert {"P -> P", "P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)", "P(product) -> P(product)"} <= specs
