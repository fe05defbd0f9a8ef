"""Softmax and gated linear units along one dim, which stays whole; in softmax's pieces (``ops.norms.softmax``) it is a factor too.

Gradients are linear in the gradient that comes in.
"""

from __future__ import annotations

from fxshard.graph.call import Call, Operand
from fxshard.strategies.engine.factors import Factors, Rule, factors, linear_groups
from fxshard.strategies.engine.registry import register
from fxshard.strategies.tensors.dims import named, normal_dims
from fxshard.strategies.tensors.pointwise import names


def along_dim(position: int, *groups: tuple[int, ...]) -> Rule:
    """All dims shared but the one in argument ``position``, which is whole and may differ in size."""

    def rule(call: Call) -> Factors:
        ndim = call.operands[0].ndim
        whole = normal_dims(call.arg(position, "dim", -1), ndim)
        tensors = [[f"w{t}!" if d in whole else f"d{d}" for d in range(ndim)] for t in range(len(call.operands) + 1)]
        return factors(tensors[:-1], tensors[-1:], linear=linear_groups(call, groups))

    return rule


register(names("_softmax _log_softmax _safe_softmax"), along_dim(1))
register(names("_softmax_backward_data _log_softmax_backward_data"), along_dim(2, (0,)))


def in_pieces(position: int, pattern: str, *groups: tuple[int, ...]) -> Rule:
    """``pattern`` names arguments and outputs: x has all dims, s all but the one in argument ``position``, c only that one.

    An argument that is None is left out; ``groups``: argument positions that it is linear in.
    """
    ins, outs = (side.split() for side in pattern.split("->"))

    def rule(call: Call) -> Factors:
        every = named(max(o.ndim for o in (*call.operands, *call.outputs) if o is not None))
        dim = call.arg(position)
        dims = {"x": every, "s": every[:dim] + every[dim + 1 :], "c": [every[dim]]}
        given = [dims[name] for name, value in zip(ins, call.args, strict=False) if isinstance(value, Operand)]
        return factors(given, [dims[name] for name in outs], linear=linear_groups(call, groups))

    return rule


register("fxshard.sum_exp.default", in_pieces(2, "x s -> s"))
register("fxshard.softmax.default", in_pieces(3, "x s s -> x"))
register("fxshard.sum_product.default", in_pieces(2, "x x -> s", (0,), (1,)))
register("fxshard.softmax_backward.default", in_pieces(3, "x x s -> x", (0, 2)))

register(names("glu"), along_dim(1))
register(names("glu_backward"), along_dim(2, (0,)))
