"""Every pointwise operator against itself, with broadcasting."""

import pytest
import torch

from fxshard.strategies import registered_ops
from tests.strategies.samples import positive, real, whole, yes_no
from tests.strategies.shards import KERNELS, check, find
from tests.torch_versions import SINCE_2_15

FORWARD = [
    "abs acosh angle asinh atan ceil cos cosh digamma elu erf erfc exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish",
    "hardtanh i0 isinf isnan leaky_relu lgamma log log10 log1p log2 logical_not mish nan_to_num neg positive reciprocal relu round",
    "rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh trunc isfinite deg2rad",
]


@pytest.mark.parametrize("name", " ".join(FORWARD).split())
def test_unary(name: str) -> None:
    if f"aten.{name}.default" in registered_ops():
        assert {"R -> R", "S(0) -> S(0)", "S(1) -> S(1)"} <= check(f"aten.{name}.default", positive(3, 5) + 1)


def test_unary_linear_operators_pass_sums() -> None:
    assert "P -> P" in check("aten.neg.default", real(3))
    assert "P -> P" not in check("aten.relu.default", real(3))


@pytest.mark.parametrize("shapes", [((4, 5), (4, 5)), ((4, 5), (5,)), ((4, 1), (1, 5)), ((2, 3, 4), (3, 1)), ((), (3, 5)), ((1,), (3, 5))])
def test_add_broadcasts(shapes: tuple[tuple[int, ...], ...]) -> None:
    specs = check("aten.add.Tensor", *(real(*s) for s in shapes), alpha=2)
    assert "P, P -> P" in specs
    assert "P, R -> P" not in specs


def test_mul_is_bilinear_and_div_is_linear_in_the_numerator() -> None:
    assert {"P, R -> P", "R, P -> P"} <= check("aten.mul.Tensor", real(4, 5), real(5))
    specs = check("aten.div.Tensor", real(4, 5), positive(5))
    assert "P, R -> P" in specs
    assert "R, P -> P" not in specs


@pytest.mark.parametrize(
    ("op", "passed"),
    [
        ("add.Scalar", {"P(avg) -> P(avg)", "P(max) -> P(max)", "P(min) -> P(min)"}),
        ("rsub.Scalar", {"P(avg) -> P(avg)", "P(max) -> P(min)", "P(min) -> P(max)"}),
        ("pow.Tensor_Scalar", {"P(product) -> P(product)"}),
        ("lt.Scalar", {"P(max) -> P(min)", "P(min) -> P(max)"}),
        ("ge.Scalar", {"P(max) -> P(max)", "P(min) -> P(min)"}),
        ("remainder.Scalar", set()),
        ("fmod.Scalar", set()),
        ("eq.Scalar", set()),
    ],
)
def test_reductions_that_pass_with_a_scalar_operand(op: str, passed: set[str]) -> None:
    assert check(f"aten.{op}", real(5, 3), 2) == {"R -> R", "S(0) -> S(0)", "S(1) -> S(1)"} | passed


def test_a_maximum_passes_elu_and_leaky_relu_with_positive_slopes_only() -> None:
    """Each scalar matters: a negative slope reverses the order."""
    for op in ("elu", "leaky_relu"):
        assert "P(max) -> P(max)" in check(f"aten.{op}.default", real(5), 0.5)
        assert "P(max) -> P(max)" not in check(f"aten.{op}.default", real(5), -0.5)
    assert "P(max) -> P(max)" not in check("aten.elu.default", real(5), 1.0, -1.0)


def test_the_sign_of_a_product_is_the_product_of_signs() -> None:
    assert {"P(product) -> P(product)", "P(max) -> P(max)"} <= check("aten.sign.default", real(5))
    assert "P(product) -> P(product)" not in check("aten.sign.default", whole(5, 5))


def test_the_sign_of_a_factor_gives_the_order() -> None:
    assert "P(max) -> P(max)" in check("aten.mul.Scalar", real(5), 2.0)
    assert "P(max) -> P(min)" in check("aten.div.Scalar", real(5), -2.0)
    assert not any("max" in s for s in check("aten.mul.Scalar", real(5), 0.0))
    assert check("aten.div.Scalar", real(5), 0.0) == {"R -> R", "S(0) -> S(0)"}  # parts of both signs would give inf - inf


def test_integers_that_wrap_around_pass_no_maximum() -> None:
    assert not any("max" in s for op in ("add", "sub") for s in check(f"aten.{op}.Tensor", whole(9, 5), whole(7, 5)))
    assert "P(max) -> P(max)" in check("aten.relu.default", whole(9, 5))


@pytest.mark.parametrize("op", ["relu", "tanh", "exp", "sigmoid", "floor", "softplus"])
def test_increasing_operators_pass_extremes(op: str) -> None:
    assert {"P(max) -> P(max)", "P(min) -> P(min)"} <= check(f"aten.{op}.default", real(5, 3))


def test_products_pass_multiplicative_operators() -> None:
    assert "P(product), P(product) -> P(product)" in check("aten.mul.Tensor", real(5), real(5))
    assert "P(product) -> P(product)" in check("aten.abs.default", real(5))
    assert not any("product" in s for s in check("aten.neg.default", real(5)))


def test_a_scalar_in_a_tensor_overload_makes_it_affine() -> None:
    assert "P -> P" not in check("aten.add.Tensor", real(5), 2.0)
    assert "P(avg) -> P(avg)" in check("aten.add.Tensor", real(5), 2.0)
    assert "P -> P" in check("aten.mul.Tensor", real(5), 2.0)


@pytest.mark.parametrize("op", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons(op: str) -> None:
    assert "S(0), S(0) -> S(0)" in check(f"aten.{op}.Tensor", real(5, 3), real(5, 3))


@pytest.mark.parametrize("op", ["atan2", "hypot", "logaddexp", "nextafter", "heaviside", "floor_divide"])
def test_binary(op: str) -> None:
    check(f"aten.{op}.default", positive(5, 3), positive(3))


def test_extremes_pass_extremes() -> None:
    assert "P(max), P(max) -> P(max)" in check("aten.maximum.default", real(4, 3), real(4, 3))
    assert "P(min), P(min) -> P(min)" in check("aten.minimum.default", real(4, 3), real(4, 3))


def test_where_and_masked_fill() -> None:
    assert "R, P, P -> P" in check("aten.where.self", yes_no(5, 3), real(5, 3), real(3))
    assert "P, R -> P" in check("aten.masked_fill.Scalar", real(5, 3), yes_no(5, 1), 0)
    assert "P, R -> P" not in check("aten.masked_fill.Scalar", real(5, 3), yes_no(5, 1), 2.0)
    check("aten.masked_fill.Tensor", real(5, 3), yes_no(5, 3), torch.tensor(2.0, dtype=torch.float64))


def test_ternary() -> None:
    assert {"P, P, R -> P", "P, R, P -> P"} <= check("aten.addcmul.default", real(5, 3), real(5, 3), real(3), value=2)
    assert "P, P, R -> P" in check("aten.addcdiv.default", real(5, 3), real(5, 3), positive(3))
    assert "P, P -> P" in check("aten.lerp.Scalar", real(5, 3), real(5, 3), 0.3)
    check("aten.clamp.default", real(5, 3), -0.5, 0.5)


@pytest.mark.parametrize(
    ("op", "extra"),
    [
        ("gelu_backward", ()),
        ("silu_backward", ()),
        ("mish_backward", ()),
        ("sigmoid_backward", ()),
        ("tanh_backward", ()),
        ("threshold_backward", (0,)),
        ("hardtanh_backward", (-1, 1)),
        ("leaky_relu_backward", (0.1, False)),
        ("softplus_backward", (1, 20)),
        ("hardswish_backward", ()),
    ],
)
def test_gradients_are_linear_in_the_gradient(op: str, extra: tuple[object, ...]) -> None:
    specs = check(f"aten.{op}.default", real(5, 3), real(5, 3), *extra)
    assert "P, R -> P" in specs
    assert "R, P -> P" not in specs


def test_prelu_backward_has_two_outputs() -> None:
    assert "P, R, R -> P, P" in check("aten._prelu_kernel_backward.default", real(4, 3), real(4, 3), positive(1, 3))


def test_integers_have_no_average_and_booleans_no_sum() -> None:
    specs = check("aten.mul.Tensor", whole(9, 5), whole(9, 5))
    assert "P, R -> P" in specs
    assert "P(avg), R -> P(avg)" not in specs
    assert not any("P -> P" in s for s in check("aten.clone.default", yes_no(5)))


GONE = {"aten.cholesky.default"} if SINCE_2_15 else set()
"""What torch 2.15 no longer has."""


def test_all_registered_aten_operators_exist() -> None:
    own = [op for op in registered_ops() if op.startswith(("aten.", "prims.", "fxshard.")) and op not in {*KERNELS, *GONE}]
    assert not [op for op in own if not hasattr(find(op), "_schema")]
