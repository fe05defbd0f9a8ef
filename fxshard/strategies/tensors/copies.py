"""Copies and casts: out[i] = x[i]."""

from __future__ import annotations

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, replicate_all
from fxshard.strategies.engine.local import on_contiguous
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.pointwise import names, overloads


def reinterpret(call: Call) -> Factors:
    """The same bytes as another dtype: free where the elements have one size."""
    (out,) = call.outputs
    assert out is not None
    if call.operands[0].dtype.itemsize != out.dtype.itemsize:
        return replicate_all(call, "elements of different size do not keep their places")
    return pointwise_rule()(call)


register("aten.view.dtype", reinterpret, local=on_contiguous(unchanged))
# Casts are copies: which reductions a change of dtype keeps is decided for all rules at once, in ``conversion``.
register(names("clone detach alias lift_fresh lift_fresh_copy contiguous resolve_conj resolve_neg"), pointwise_rule((0,), ops=MOVEMENT))
register(names("_to_copy") + overloads("to", "dtype", "device"), pointwise_rule((0,), ops=MOVEMENT))
register("prims.convert_element_type.default", pointwise_rule((0,), ops=MOVEMENT))
# copy(into, x): only x is read; ``into`` is written in its place.
register(names("copy copy_"), pointwise_rule((0, 1), ops=MOVEMENT, enforce=((0, 0),)))
# Checks of values: run on the whole tensor, they have no output.
register(names("_assert_async _assert_async.msg"), replicate_all)
