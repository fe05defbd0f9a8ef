"""Pointwise operators: out[i] = f(a[i], b[i], ...), every dim free. One list per kind of linearity."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.conversion import is_inexact
from fxshard.strategies.engine.factors import IDEMPOTENT, MOVEMENT, Factors, Rule, linear_groups
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register


def names(text: str) -> list[str]:
    """``"add.Tensor relu"`` -> aten names; ``.default`` where no overload is given, ``x.[A B]`` as ``x.A x.B``."""
    return [f"aten.{op}" if "." in op else f"aten.{op}.default" for op in text.split()]


def overloads(text: str, *kinds: str) -> list[str]:
    """All the operators in ``text`` with each of the overloads ``kinds``."""
    return [f"aten.{op}.{kind}" for op in text.split() for kind in kinds]


def masked_fill(call: Call) -> Factors:
    """out = mask ? value : x. A filled zero is a zero on all ranks; another number is its own average and extreme."""
    value = call.arg(2)
    whole = not isinstance(value, Operand) and value == 0
    return pointwise_rule((0,), ops=MOVEMENT if whole else IDEMPOTENT)(call)


def scaled(call: Call) -> Factors:
    """x times or over a number: linear, and of the order that the number's sign gives; two tensors: linear in the first."""
    number = call.arg(1)
    divides = call.op.startswith("aten.div")
    groups: list[tuple[int, ...]] = [(0,)] if divides else [(0,), (1,)]
    if divides and not isinstance(number, (Operand, complex)) and number == 0:
        return pointwise_rule()(call)  # parts of both signs become infinities of both
    if isinstance(number, (Operand, complex)) or number == 0:
        return pointwise_rule(*groups, products=[(0, 1)])(call)
    return pointwise_rule((0,), rising=(0,) if number > 0 else (), falling=(0,) if number < 0 else (), real=True)(call)


def power(call: Call) -> Factors:
    """x ** n: multiplicative where n is a whole number, of one order where it is odd."""
    exponent = call.arg(1)
    whole = not isinstance(exponent, (Operand, complex)) and math.isfinite(exponent) and exponent == int(exponent) and exponent > 0
    return pointwise_rule(products=[(0,)] if whole else (), rising=(0,) if whole and exponent % 2 else (), real=True)(call)


def exponential(call: Call) -> Factors:
    """number ** x: rising where the number is greater than one."""
    base = call.arg(0)
    return pointwise_rule(rising=(1,) if not isinstance(base, (Operand, complex)) and base > 1 else (), real=True)(call)


def added(rises: bool, scaled: int = 1) -> Rule:
    """x + alpha y (``rises``) or x - alpha y, ``scaled`` being the operand that alpha multiplies: alpha's sign gives its order."""

    def rule(call: Call) -> Factors:
        alpha = call.arg(2, "alpha", 1)
        if isinstance(alpha, complex) or alpha == 0:
            return pointwise_rule((0, 1))(call)
        up = (alpha > 0) == rises
        plain = 1 - scaled
        return pointwise_rule((0, 1), rising=(plain, scaled) if up else (plain,), falling=() if up else (scaled,), real=True)(call)

    return rule


def bent(call: Call) -> Factors:
    """Lines of two slopes, or a line and a curve: rising where their numbers are; a slope of zero has no number for an infinite part."""
    numbers = [a for a in call.args[1:] if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return pointwise_rule(rising=() if any(n <= 0 for n in numbers) else (0,))(call)


def softened(call: Call) -> Factors:
    """log(1 + exp(beta x)) / beta up to a threshold and x beyond: a step down there, which from 20 on is less than 1e-9 of x."""
    return pointwise_rule(rising=(0,) if call.arg(2, "threshold", 20) >= 20 else ())(call)


def offset(call: Call) -> Factors:
    """x + number: affine, and rising."""
    return pointwise_rule((0, 1), rising=(0,), real=True)(call)


def rounded(call: Call) -> Factors:
    """To whole numbers, which are what they are already."""
    return pointwise_rule(rising=(0,))(call) if is_inexact(call.operands[0].dtype) else pointwise_rule((0,), ops=MOVEMENT)(call)


def signed(call: Call) -> Factors:
    """Rising, and the sign of a product is the product of signs, unless it wraps around."""
    return pointwise_rule(rising=(0,), products=[(0,)] if is_inexact(call.operands[0].dtype) else ())(call)


def clamped(call: Call) -> Factors:
    """min(max(x, low), high): rising in each; an extreme of two of them at once where they meet in that extreme."""
    both = (*linear_groups(call, [(0, 1)], ("max",)), *linear_groups(call, [(0, 2), (1, 2)], ("min",)))
    alone = pointwise_rule(rising=(0, 1, 2))(call)
    return replace(alone, linear=(*alone.linear, *both))


def logical(*order: str) -> Rule:
    """Truth of numbers: of booleans it is in order, ``order`` naming the extremes that pass through both operands at once."""

    def rule(call: Call) -> Factors:
        ordered = all(o.dtype == torch.bool for o in call.operands)
        positions = range(len(call.args))
        return pointwise_rule(tuple(positions), ops=order, rising=positions)(call) if ordered else pointwise_rule()(call)

    return rule


def _booleans(call: Call) -> tuple[int, ...]:
    return tuple(range(len(call.operands))) if all(o.dtype == torch.bool for o in call.operands) else ()


# Linear in both at once, sum f(x, y) = f(sum x, sum y); a scalar for y is the same on all ranks.
register(names("add.Tensor"), added(rises=True))
register(names("sub.Tensor"), added(rises=False))
register(names("rsub.Tensor rsub.Scalar"), added(rises=False, scaled=0))
register(names("lerp.Scalar lerp.Tensor addcdiv complex"), pointwise_rule((0, 1)))
register(names("addcmul"), pointwise_rule((0, 1), (0, 2)))
register(names("where.self where.ScalarOther where.ScalarSelf where.Scalar"), pointwise_rule((1, 2), ops=MOVEMENT))
register(names("add.Scalar"), offset)
register(names("sub.Scalar"), offset)

# Linear in each operand alone.
register([*overloads("mul", "Tensor", "Scalar"), *overloads("div", "Tensor", "Scalar")], scaled)
register(names("neg"), pointwise_rule((0,), falling=(0,), real=True))
register(names("deg2rad rad2deg"), pointwise_rule((0,), rising=(0,)))
register(names("real imag _conj _conj_physical conj_physical _neg_view"), pointwise_rule((0,)))

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
register(names("maximum fmax"), pointwise_rule((0, 1), ops=("max",), rising=(0, 1)))
register(names("minimum fmin"), pointwise_rule((0, 1), ops=("min",), rising=(0, 1)))

register(overloads("masked_fill", "Scalar", "Tensor"), masked_fill)

# One operand, of one order: the extreme of the results is the result of the extreme.
register(
    names(
        "asinh atan celu erf exp exp2 expm1 hardshrink hardsigmoid hardtanh relu relu6 "
        "selu sigmoid sgn sinh softshrink special_log_ndtr tanh clamp clamp_min clamp_max"
    ),
    pointwise_rule(rising=(0,)),
)
register(names("elu leaky_relu"), bent)
register(names("softplus"), softened)
register(names("ceil floor round round.decimals trunc"), rounded)
register(names("sign"), signed)
register(names("erfc"), pointwise_rule(falling=(0,)))
register(overloads("gt ge", "Tensor", "Scalar"), pointwise_rule(rising=(0,), falling=(1,), compares=True))
register(overloads("lt le", "Tensor", "Scalar"), pointwise_rule(rising=(1,), falling=(0,), compares=True))
register(names("isposinf"), pointwise_rule(rising=(0,), compares=True))
register(names("isneginf"), pointwise_rule(falling=(0,), compares=True))
register(names("clamp.Tensor"), clamped)
register(overloads("clamp_min clamp_max", "Tensor"), pointwise_rule(rising=(0, 1)))

# Truth values.
register(names("logical_or bitwise_or.Tensor"), logical("max"))
register(names("logical_and bitwise_and.Tensor"), logical("min"))
register(names("logical_not bitwise_not"), lambda call: pointwise_rule(falling=_booleans(call))(call))

# Multiplicative.
register(names("reciprocal square"), pointwise_rule(products=[(0,)]))
register(names("abs"), pointwise_rule(products=[(0,)], compares=True, real=True))
register(names("pow.Tensor_Scalar"), power)
register(names("pow.Scalar"), exponential)

# Defined for numbers above some bound only: those above the least one are in it too, those below the greatest may not be.
register(names("acosh log log10 log1p log2 sqrt"), pointwise_rule((0,), ops=("min",)))

# One operand, of no order.
register(
    names(
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
register(names("pow.Tensor_Tensor"), pointwise_rule())
register(overloads("div", "Tensor_mode", "Scalar_mode"), pointwise_rule())
register(overloads("xlogy", "Tensor", "Scalar_Self", "Scalar_Other"), pointwise_rule())
register(
    names(
        "atan2 floor_divide heaviside hypot logaddexp logaddexp2 logical_xor nextafter polar special_zeta "
        "gcd lcm ldexp.Tensor remainder.Scalar_Tensor _prelu_kernel fill.Tensor"
    ),
    pointwise_rule(),
)
