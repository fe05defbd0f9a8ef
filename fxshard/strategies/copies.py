"""Copies and casts: out[i] = x[i]."""

from __future__ import annotations

import torch

from fxshard.call import Call
from fxshard.strategies.factors import MOVEMENT, SUMS, Factors, replicate_all
from fxshard.strategies.notation import pointwise_rule
from fxshard.strategies.pointwise import names, overloads
from fxshard.strategies.registry import register


def cast(call: Call) -> Factors:
    """A cast between kinds of numbers keeps sums; from real to whole numbers it rounds, so it does not."""
    (out,) = call.outputs
    source = call.operands[0].dtype
    assert out is not None
    if source == out.dtype:
        return pointwise_rule((0,), ops=MOVEMENT)(call)
    exact = out.dtype.is_floating_point or out.dtype.is_complex or not (source.is_floating_point or source.is_complex)
    keeps = exact and torch.bool not in (source, out.dtype) and not (source.is_complex and not out.dtype.is_complex)
    return pointwise_rule((0,), ops=SUMS if keeps else ())(call)


def reinterpret(call: Call) -> Factors:
    """The same bytes as another dtype: free where the elements have one size."""
    (out,) = call.outputs
    assert out is not None
    if call.operands[0].dtype.itemsize != out.dtype.itemsize:
        return replicate_all(call, "elements of different size do not keep their places")
    return pointwise_rule()(call)


register("aten.view.dtype", reinterpret)
register(names("clone detach alias lift_fresh lift_fresh_copy contiguous resolve_conj resolve_neg"), pointwise_rule((0,), ops=MOVEMENT))
register(names("_to_copy") + overloads("to", "dtype", "device") + ["prims.convert_element_type.default"], cast)
# copy(into, x): only x is read; ``into`` is written in its place.
register(names("copy copy_"), pointwise_rule((0, 1), ops=MOVEMENT, enforce=((0, 0),)))
# Checks of values: run on the whole tensor, they have no output.
register(names("_assert_async _assert_async.msg"), replicate_all)
