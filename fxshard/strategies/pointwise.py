"""Pointwise operators: out[i] = f(a[i], b[i], ...), every dim free. One list per kind of linearity."""

from __future__ import annotations

from fxshard.call import Call, Operand
from fxshard.strategies.factors import MOVEMENT, Factors
from fxshard.strategies.notation import pointwise_rule
from fxshard.strategies.registry import register


def names(text: str) -> list[str]:
    """``"add.Tensor relu"`` -> aten names; ``.default`` where no overload is given, ``x.[A B]`` as ``x.A x.B``."""
    return [f"aten.{op}" if "." in op else f"aten.{op}.default" for op in text.split()]


def overloads(text: str, *kinds: str) -> list[str]:
    """All the operators in ``text`` with each of the overloads ``kinds``."""
    return [f"aten.{op}.{kind}" for op in text.split() for kind in kinds]


def masked_fill(call: Call) -> Factors:
    """out = mask ? value : x. A filled value is the same on all ranks, so it is its own max, min and average."""
    value = call.arg(2)
    whole = not isinstance(value, Operand) and value == 0
    return pointwise_rule((0,), ops=MOVEMENT if whole else ("avg", "max", "min"))(call)


# Linear in both at once, sum f(x, y) = f(sum x, sum y); with a scalar for y it is affine, so not at all.
register(names("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar lerp.Tensor addcdiv complex"), pointwise_rule((0, 1)))
register(names("addcmul"), pointwise_rule((0, 1), (0, 2)))
register(names("where.self where.ScalarOther where.ScalarSelf where.Scalar"), pointwise_rule((1, 2)))

# Linear in each operand alone.
register(overloads("mul", "Tensor", "Scalar"), pointwise_rule((0,), (1,)))
register(overloads("div", "Tensor", "Scalar"), pointwise_rule((0,)))
register(names("neg real imag _conj _conj_physical conj_physical _neg_view deg2rad rad2deg"), pointwise_rule((0,)))

# Gradients are linear in the gradient that comes in.
register(
    names(
        "gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward hardswish_backward "
        "hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward mish_backward log_sigmoid_backward "
        "softshrink_backward hardshrink_backward logit_backward native_dropout_backward _prelu_kernel_backward"
    ),
    pointwise_rule((0,)),
)
register("fxshard.dropout_backward.default", pointwise_rule((0,)))

# An extreme of extremes is an extreme.
register(names("maximum fmax"), pointwise_rule((0, 1), ops=("max",)))
register(names("minimum fmin"), pointwise_rule((0, 1), ops=("min",)))

register(overloads("masked_fill", "Scalar", "Tensor"), masked_fill)

# Not linear: one operand.
register(
    names(
        "abs acos acosh angle asin asinh atan atanh bitwise_not ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor "
        "frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward "
        "logical_not logit mish nan_to_num polygamma positive reciprocal relu relu6 round round.decimals rsqrt selu sgn sigmoid sign "
        "signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr "
        "special_ndtri sqrt square tan tanh threshold trunc isposinf isneginf isfinite clamp clamp_min clamp_max fill.Scalar"
    ),
    pointwise_rule(),
)

# Not linear: two operands or more.
register(overloads("add sub rsub", "Scalar"), pointwise_rule())
register(overloads("eq ne lt le gt ge fmod remainder copysign", "Tensor", "Scalar"), pointwise_rule())
register(overloads("bitwise_and bitwise_or bitwise_xor", "Tensor", "Scalar", "Scalar_Tensor"), pointwise_rule())
register(overloads("bitwise_left_shift bitwise_right_shift", "Tensor", "Tensor_Scalar"), pointwise_rule())
register(overloads("pow", "Tensor_Tensor", "Tensor_Scalar", "Scalar"), pointwise_rule())
register(overloads("div", "Tensor_mode", "Scalar_mode"), pointwise_rule())
register(overloads("xlogy", "Tensor", "Scalar_Self", "Scalar_Other"), pointwise_rule())
register(overloads("clamp clamp_min clamp_max", "Tensor"), pointwise_rule())
register(
    names(
        "atan2 floor_divide heaviside hypot logaddexp logaddexp2 logical_and logical_or logical_xor nextafter polar special_zeta "
        "gcd lcm ldexp.Tensor remainder.Scalar_Tensor _prelu_kernel fill.Tensor"
    ),
    pointwise_rule(),
)
