"""Softmax and gated linear units along one dim, which stays whole; in decomposed softmax (``ops.norms.softmax``) it can be sharded.

Gradients are linear in the incoming gradient.
"""

from __future__ import annotations

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Factors, Rule, factors, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.tensors.dims import named, normalised_dims
from fxshard.strategies.tensors.pointwise import aten_names


def along_dim(position: int, *groups: tuple[int, ...]) -> Rule:
    """All tensors share all dims except that in argument ``position``, which stays whole and may differ in size."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        whole = normalised_dims(call.arg(position, "dim", -1), ndim)
        tensors = [[f"w{t}!" if d in whole else f"d{d}" for d in range(ndim)] for t in range(len(call.operands) + 1)]
        return factors(tensors[:-1], tensors[-1:], linear=linear_groups(call, groups))

    return rule


register(aten_names("_softmax _log_softmax _safe_softmax"), along_dim(1))
register(aten_names("_softmax_backward_data _log_softmax_backward_data"), along_dim(2, (0,)))


def decomposed(position: int, pattern: str, *groups: tuple[int, ...]) -> Rule:
    """``pattern`` gives the dims of arguments and outputs: x has all, s all except that in argument ``position``, c only that one.

    Arguments that are None are left out; ``groups``: argument positions in which the operator is linear.
    """
    ins, outs = (side.split() for side in pattern.split("->"))

    def rule(call: Call) -> Factors:
        every = named(max(o.ndim for o in (*call.operands, *call.outputs) if o is not None))
        dim = call.arg(position)
        dims = {"x": every, "s": every[:dim] + every[dim + 1 :], "c": [every[dim]]}
        given = [dims[name] for name, value in zip(ins, call.args, strict=False) if isinstance(value, Operand)]
        return factors(given, [dims[name] for name in outs], linear=linear_groups(call, groups))

    return rule


register("fxshard.sum_exp.default", decomposed(2, "x s -> s"))
register("fxshard.softmax.default", decomposed(3, "x s s -> x"))
register("fxshard.sum_product.default", decomposed(2, "x x -> s", (0,), (1,)))
register("fxshard.softmax_backward.default", decomposed(3, "x x s -> x", (0, 2)))

register(aten_names("glu"), along_dim(1))
register(aten_names("glu_backward"), along_dim(2, (0,)))
