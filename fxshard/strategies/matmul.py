"""Contractions: out[m, n] = sum_k a[m, k] b[k, n]; k sharded leaves a pending sum."""

from __future__ import annotations

from fxshard.strategies.call import Call
from fxshard.strategies.factors import Factors, Rule, factors, linear_groups
from fxshard.strategies.notation import einop_rule, letters
from fxshard.strategies.registry import register


def einsum(call: Call) -> Factors:
    """The equation is the rule: its letters are the factors."""
    operands, outputs = letters(call.arg(2))
    return factors(operands, outputs, linear=linear_groups(call, [(0,), (1,)]))


def linear(call: Call) -> Factors:
    """out = x w^T + bias, the bias added once."""
    lead = [f"l{i}" for i in range(call.operands[0].ndim - 1)]
    operands = [[*lead, "k"], ["n", "k"], ["n"]][: len(call.operands)]
    return factors(operands, [[*lead, "n"]], linear=linear_groups(call, [(0, 2), (1, 2)]), additive=tuple(range(2, len(operands))))


def added(a: str, b: str, out: str) -> Rule:
    """out = beta c + alpha a b, with c broadcast to out and added once."""

    def contraction(call: Call) -> Factors:
        bias = out.split()[len(out.split()) - call.operands[0].ndim :]
        operands = [bias, a.split(), b.split()]
        return factors(operands, [out.split()], linear=linear_groups(call, [(0, 1), (0, 2)]), additive=(0,))

    return contraction


register("fxshard.einsum.default", einsum)
register("aten.linear.default", linear)
register("aten.mm.default", einop_rule("m k, k n -> m n"))
register("aten.bmm.default", einop_rule("b m k, b k n -> b m n"))
register("aten.mv.default", einop_rule("m k, k -> m"))
register("aten.dot.default", einop_rule("k, k ->"))
register("aten.addmm.default", added("m k", "k n", "m n"))
register("aten.addmv.default", added("m k", "k", "m"))
register("aten.baddbmm.default", added("b m k", "b k n", "b m n"))
