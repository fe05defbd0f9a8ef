"""Contractions: out[m, n] = sum_k a[m, k] b[k, n]; k sharded leaves a pending sum."""

from __future__ import annotations

import math

from fxshard.graph.call import Call
from fxshard.strategies.engine.factors import Factors, Rule, factors, linear_groups, replicate_all
from fxshard.strategies.engine.local import on_contiguous
from fxshard.strategies.engine.notation import einop_rule, letters
from fxshard.strategies.engine.registry import register, unchanged


def einsum(call: Call) -> Factors:
    """The equation is the rule: its letters are the factors."""
    operands, outputs = letters(call.arg(2))
    return factors(operands, outputs, linear=linear_groups(call, [(0,), (1,)]))


def linear(call: Call) -> Factors:
    """out = x w^T + bias."""
    lead = [f"l{i}" for i in range(call.operands[0].ndim - 1)]
    operands = [[*lead, "k"], ["n", "k"], ["n"]][: len(call.operands)]
    return factors(operands, [[*lead, "n"]], linear=linear_groups(call, [(0, 2), (1, 2)]), additive=tuple(range(2, len(operands))))


def addmm(a: str, b: str, out: str) -> Rule:
    """out = beta c + alpha a b, with c broadcast to out."""

    def contraction(call: Call) -> Factors:
        bias = out.split()[len(out.split()) - call.operands[0].ndim :]
        operands = [bias, a.split(), b.split()]
        return factors(operands, [out.split()], linear=linear_groups(call, [(0, 1), (0, 2)]), additive=(0,))

    return contraction


def trilinear(call: Call) -> Factors:
    """out = sum of a b c over some dims, each operand broadcast along its expanded dims."""
    ndim = call.operands[0].ndim + len(call.arg(3))
    operands = [[f"d{d}" for d in range(ndim) if d not in call.arg(position)] for position in (3, 4, 5)]
    outs = [f"d{d}" for d in range(ndim) if d not in call.arg(6)]
    return factors(operands, [outs], linear=linear_groups(call, [(0,), (1,), (2,)]))


PAIRS = "a shard of the rows is not a shard of the pairs, and the root of a sum cannot be pending"


def distance(call: Call) -> Factors:
    """out[m, n] = p-norm of a[m, :] - b[n, :]."""
    ndim, (a, b) = call.output.ndim, call.operands
    batch, (k, reduce) = _batches(ndim), _reduced_factor(call.args[2])
    return factors([[*batch[ndim - a.ndim :], "m", k], [*batch[ndim - b.ndim :], "n", k]], [[*batch, "m", "n"]], reduce=reduce)


def pair_distance(call: Call) -> Factors:
    """out[pair (m, n)] = p-norm of x[m, :] - x[n, :], m < n. Rows stay whole: a shard of them is not a shard of the pairs."""
    k, reduce = _reduced_factor(call.args[1] if len(call.args) > 1 else 2.0)
    return factors([["rows!", k]], [["pairs!"]], reduce=reduce) if reduce else replicate_all(call, PAIRS)


def pair_distance_backward(call: Call) -> Factors:
    """(grad, x, p, distances) -> the gradient of x; a column depends only on the same column of x and the distances."""
    return factors([["pairs!"], ["rows!", "k"], ["pairs!"]], [["rows!", "k"]], linear=linear_groups(call, [(0,)]))


def _reduced_factor(p: float) -> tuple[str, dict[str, str]]:
    """The factor k that a p-norm reduces, and the reduction pending if it is sharded; other norms need k whole, because of the root."""
    pending = {0.0: "sum", 1.0: "sum", math.inf: "max"}.get(float(p))
    return ("k!", {}) if pending is None else ("k", {"k": pending})


def distance_backward(call: Call) -> Factors:
    """(grad, a, b, p, distances) -> the gradient of a: a sum over n, linear in grad; columns k are independent."""
    ndim = call.operands[0].ndim
    batch = _batches(ndim)
    a, b = ([*batch[ndim - call.operands[i].ndim :], name, "k"] for i, name in ((1, "m"), (2, "n")))
    pairs = [*batch, "m", "n"]
    return factors([pairs, a, b, pairs], [[*batch[ndim - call.output.ndim :], "m", "k"]], linear=linear_groups(call, [(0,)]))


def _batches(ndim: int) -> list[str]:
    return [f"b{i}" for i in range(ndim - 2)]


def addmm_activation(call: Call) -> Factors:
    """f(c + a b): f is not linear, so k stays whole."""
    return factors([["m", "n"][2 - call.operands[0].ndim :], ["m", "k!"], ["k!", "n"]], [["m", "n"]])


register("fxshard.einsum.default", einsum)
register("aten.linear.default", linear)
register("aten._trilinear.default", trilinear)
register("aten._cdist_forward.default", distance)
register("aten._cdist_backward.default", distance_backward)
register("aten._pdist_forward.default", pair_distance, local=on_contiguous(unchanged))
register("aten._pdist_backward.default", pair_distance_backward, local=on_contiguous(unchanged))
register(["aten.mm.default", "aten.mm.dtype", "aten._int_mm.default"], einop_rule("m k, k n -> m n"))
register(["aten.bmm.default", "aten.bmm.dtype"], einop_rule("b m k, b k n -> b m n"))
register("aten.mv.default", einop_rule("m k, k -> m"))
register(["aten.dot.default", "aten.vdot.default"], einop_rule("k, k ->"))
register(["aten.addmm.default", "aten.addmm.dtype"], addmm("m k", "k n", "m n"))
register("aten._addmm_activation.default", addmm_activation)
register("aten.addmv.default", addmm("m k", "k", "m"))
register(["aten.baddbmm.default", "aten.baddbmm.dtype"], addmm("b m k", "b k n", "b m n"))
