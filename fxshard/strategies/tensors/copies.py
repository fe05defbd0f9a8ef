"""Copies and casts: out[i] = x[i]."""

from __future__ import annotations

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import MOVEMENT, Factors, replicate_all
from fxshard.strategies.engine.local import on_contiguous
from fxshard.strategies.engine.notation import pointwise_rule
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.pointwise import aten_names, overloads


def reinterpret(call: Call) -> Factors:
    """The same bytes as another dtype: every dim can be sharded if both dtypes have the same element size."""
    if call.operands[0].dtype.itemsize != call.output.dtype.itemsize:
        return replicate_all(call, "elements change their size, and so their positions")
    return pointwise_rule()(call)


register("aten.view.dtype", reinterpret, local=on_contiguous(unchanged))
# Casts are copies; ``conversion`` decides for all rules which reductions commute with a change of dtype.
register(
    aten_names("clone detach alias lift_fresh lift_fresh_copy contiguous resolve_conj resolve_neg"), pointwise_rule((0,), ops=MOVEMENT)
)
register(aten_names("_to_copy") + overloads("to", "dtype", "device"), pointwise_rule((0,), ops=MOVEMENT))
register("prims.convert_element_type.default", pointwise_rule((0,), ops=MOVEMENT))
# copy(into, x) reads only x; the result shares the memory of ``into``.
register(aten_names("copy copy_"), pointwise_rule((0, 1), ops=MOVEMENT, enforce=((0, 0),)))
# Assertions on values have no output; they run on whole tensors.
register(aten_names("_assert_async _assert_async.msg"), replicate_all)
