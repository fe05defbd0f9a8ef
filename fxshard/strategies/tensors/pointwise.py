"""Pointwise operators: out[i] = f(a[i], b[i], ...), every dim can be sharded. One list per property of f."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.factors import IDEMPOTENT, MOVEMENT, Factors, Rule, linear_groups
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register


def aten_names(text: str) -> list[str]:
    """``"add.Tensor relu"`` -> ``["aten.add.Tensor", "aten.relu.default"]``."""
    return [f"aten.{op}" if "." in op else f"aten.{op}.default" for op in text.split()]


def overloads(text: str, *kinds: str) -> list[str]:
    """Each operator in ``text`` with each of the overloads ``kinds``."""
    return [f"aten.{op}.{kind}" for op in text.split() for kind in kinds]


def masked_fill(call: Call) -> Factors:
    """out = mask ? value : x. All reductions map zeros to zero; with any other fill value only idempotent ones pass."""
    value = call.arg(2)
    whole = not isinstance(value, Operand) and value == 0
    return pointwise_rule((0,), ops=MOVEMENT if whole else IDEMPOTENT)(call)


def multiply(call: Call) -> Factors:
    """A product or quotient. Of x and a number: linear, and increasing or decreasing by the number's sign. Of two tensors: linear in each
    factor, or in the numerator, and multiplicative."""
    number = call.arg(1)
    divides = call.op.startswith("aten.div")
    groups: list[tuple[int, ...]] = [(0,)] if divides else [(0,), (1,)]
    if divides and not isinstance(number, (Operand, complex)) and number == 0:
        return pointwise_rule()(call)  # parts of both signs become infinities of both
    if isinstance(number, (Operand, complex)) or number == 0:
        return pointwise_rule(*groups, products=[(0, 1)])(call)
    return pointwise_rule((0,), increasing=(0,) if number > 0 else (), decreasing=(0,) if number < 0 else (), real=True)(call)


def power(call: Call) -> Factors:
    """x ** n: multiplicative for positive integers n, increasing for odd ones."""
    exponent = call.arg(1)
    whole = not isinstance(exponent, (Operand, complex)) and math.isfinite(exponent) and exponent == int(exponent) and exponent > 0
    return pointwise_rule(products=[(0,)] if whole else (), increasing=(0,) if whole and exponent % 2 else (), real=True)(call)


def exponential(call: Call) -> Factors:
    """number ** x: increasing if the number is above 1."""
    base = call.arg(0)
    return pointwise_rule(increasing=(1,) if not isinstance(base, (Operand, complex)) and base > 1 else (), real=True)(call)


def add(rises: bool, scaled: int = 1) -> Rule:
    """x + alpha y (``rises``) or x - alpha y: increasing or decreasing in operand ``scaled``, which alpha multiplies, by alpha's sign."""

    def rule(call: Call) -> Factors:
        alpha = call.arg(2, "alpha", 1)
        if isinstance(alpha, complex) or alpha == 0:
            return pointwise_rule((0, 1))(call)
        up = (alpha > 0) == rises
        plain = 1 - scaled
        return pointwise_rule((0, 1), increasing=(plain, scaled) if up else (plain,), decreasing=() if up else (scaled,), real=True)(call)

    return rule


def piecewise(call: Call) -> Factors:
    """elu and leaky_relu: increasing if all their numbers are positive; a slope of zero would map infinite parts to NaN."""
    numbers = [a for a in call.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return pointwise_rule(increasing=() if any(n <= 0 for n in numbers) else (0,))(call)


def softplus(call: Call) -> Factors:
    """softplus: log(1 + exp(beta x)) / beta up to a threshold, x beyond. From 20 on, the step down at the threshold is below 1e-9 x."""
    return pointwise_rule(increasing=(0,) if call.arg(2, "threshold", 20) >= 20 else ())(call)


def add_number(call: Call) -> Factors:
    """x + number: affine and increasing."""
    return pointwise_rule((0, 1), increasing=(0,), real=True)(call)


def rounding(call: Call) -> Factors:
    """Rounding: increasing; the identity on integers."""
    return pointwise_rule(increasing=(0,))(call) if is_inexact(call.operands[0].dtype) else pointwise_rule((0,), ops=MOVEMENT)(call)


def sign_rule(call: Call) -> Factors:
    """sign: increasing, and multiplicative unless integers wrap around."""
    return pointwise_rule(increasing=(0,), products=[(0,)] if is_inexact(call.operands[0].dtype) else ())(call)


def clamp_rule(call: Call) -> Factors:
    """min(max(x, low), high): increasing in each argument; maxima pass (x, low) jointly, minima pass (x, high) and (low, high)."""
    both = (*linear_groups(call, [(0, 1)], ("max",)), *linear_groups(call, [(0, 2), (1, 2)], ("min",)))
    alone = pointwise_rule(increasing=(0, 1, 2))(call)
    return replace(alone, linear=(*alone.linear, *both))


def logical(*order: str) -> Rule:
    """Logical operators: increasing for booleans; ``order``: "max" or "min" if it passes through both operands jointly."""

    def rule(call: Call) -> Factors:
        ordered = all(o.dtype == torch.bool for o in call.operands)
        positions = range(len(call.args))
        return pointwise_rule(tuple(positions), ops=order, increasing=positions)(call) if ordered else pointwise_rule()(call)

    return rule


def _booleans(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.operands))) if all(o.dtype == torch.bool for o in call.operands) else ()


# Jointly linear, sum f(x, y) = f(sum x, sum y); a scalar y is equal on all ranks.
register(aten_names("add.Tensor"), add(rises=True))
register(aten_names("sub.Tensor"), add(rises=False))
register(aten_names("rsub.Tensor rsub.Scalar"), add(rises=False, scaled=0))
register(aten_names("lerp.Scalar lerp.Tensor addcdiv complex"), pointwise_rule((0, 1)))
register(aten_names("addcmul"), pointwise_rule((0, 1), (0, 2)))
register(aten_names("where.self where.ScalarOther where.ScalarSelf where.Scalar"), pointwise_rule((1, 2), ops=MOVEMENT))
register(aten_names("add.Scalar"), add_number)
register(aten_names("sub.Scalar"), add_number)

# Linear in each operand separately.
register([*overloads("mul", "Tensor", "Scalar"), *overloads("div", "Tensor", "Scalar")], multiply)
register(aten_names("neg"), pointwise_rule((0,), decreasing=(0,), real=True))
register(aten_names("deg2rad rad2deg"), pointwise_rule((0,), increasing=(0,)))
register(aten_names("real imag _conj _conj_physical conj_physical _neg_view"), pointwise_rule((0,)))

# Gradients are linear in the incoming gradient.
register(
    aten_names(
        "gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward hardtanh_backward hardswish_backward "
        "hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward mish_backward log_sigmoid_backward "
        "softshrink_backward hardshrink_backward logit_backward native_dropout_backward _prelu_kernel_backward"
    ),
    pointwise_rule((0,)),
)
register("fxshard.dropout_backward.default", pointwise_rule((0,)))

# A maximum of maxima is a maximum; likewise minima.
register(aten_names("maximum fmax"), pointwise_rule((0, 1), ops=("max",), increasing=(0, 1)))
register(aten_names("minimum fmin"), pointwise_rule((0, 1), ops=("min",), increasing=(0, 1)))

register(overloads("masked_fill", "Scalar", "Tensor"), masked_fill)

# Monotone functions of one operand: the maximum of the results is the result of the maximum (of the minimum, if decreasing).
register(
    aten_names(
        "asinh atan celu erf exp exp2 expm1 hardshrink hardsigmoid hardtanh relu relu6 "
        "selu sigmoid sgn sinh softshrink special_log_ndtr tanh clamp clamp_min clamp_max"
    ),
    pointwise_rule(increasing=(0,)),
)
register(aten_names("elu leaky_relu"), piecewise)
register(aten_names("softplus"), softplus)
register(aten_names("ceil floor round round.decimals trunc"), rounding)
register(aten_names("sign"), sign_rule)
register(aten_names("erfc"), pointwise_rule(decreasing=(0,)))
register(overloads("gt ge", "Tensor", "Scalar"), pointwise_rule(increasing=(0,), decreasing=(1,), compares=True))
register(overloads("lt le", "Tensor", "Scalar"), pointwise_rule(increasing=(1,), decreasing=(0,), compares=True))
register(aten_names("isposinf"), pointwise_rule(increasing=(0,), compares=True))
register(aten_names("isneginf"), pointwise_rule(decreasing=(0,), compares=True))
register(aten_names("clamp.Tensor"), clamp_rule)
register(overloads("clamp_min clamp_max", "Tensor"), pointwise_rule(increasing=(0, 1)))

# Truth values.
register(aten_names("logical_or bitwise_or.Tensor"), logical("max"))
register(aten_names("logical_and bitwise_and.Tensor"), logical("min"))
register(aten_names("logical_not bitwise_not"), lambda call: pointwise_rule(decreasing=_booleans(call))(call))

# Multiplicative.
register(aten_names("reciprocal square"), pointwise_rule(products=[(0,)]))
register(aten_names("abs"), pointwise_rule(products=[(0,)], compares=True, real=True))
register(aten_names("pow.Tensor_Scalar"), power)
register(aten_names("pow.Scalar"), exponential)

# Increasing, but defined above some bound only: minima pass, because all parts are above the minimum; parts of a maximum may be undefined.
register(aten_names("acosh log log10 log1p log2 sqrt"), pointwise_rule((0,), ops=("min",)))

# One operand, not monotone.
register(
    aten_names(
        "acos angle asin atanh cos cosh digamma erfinv frac gelu hardswish i0 isinf isnan lgamma logit mish "
        "nan_to_num polygamma positive rsqrt signbit silu sin sinc special_entr special_erfcx special_i0e special_i1 special_i1e "
        "special_ndtri tan threshold isfinite fill.Scalar log_sigmoid_forward"
    ),
    pointwise_rule(),
)

# Two operands or more.
register(overloads("eq ne fmod remainder copysign", "Tensor", "Scalar"), pointwise_rule())
register(overloads("bitwise_and bitwise_or", "Scalar", "Scalar_Tensor"), pointwise_rule())
register(overloads("bitwise_xor", "Tensor", "Scalar", "Scalar_Tensor"), pointwise_rule())
register(overloads("bitwise_left_shift bitwise_right_shift", "Tensor", "Tensor_Scalar"), pointwise_rule())
register(aten_names("pow.Tensor_Tensor"), pointwise_rule())
register(overloads("div", "Tensor_mode", "Scalar_mode"), pointwise_rule())
register(overloads("xlogy", "Tensor", "Scalar_Self", "Scalar_Other"), pointwise_rule())
register(
    aten_names(
        "atan2 floor_divide heaviside hypot logaddexp logaddexp2 logical_xor nextafter polar special_zeta "
        "gcd lcm ldexp.Tensor remainder.Scalar_Tensor _prelu_kernel fill.Tensor"
    ),
    pointwise_rule(),
)
