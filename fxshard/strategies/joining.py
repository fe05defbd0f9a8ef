"""Joining and splitting along a dim, which stays whole: cat, stack, split, unbind."""

from __future__ import annotations

from fxshard.call import Call, TensorMeta
from fxshard.strategies.dims import named
from fxshard.strategies.factors import MOVEMENT, Factors, factors, linear_groups
from fxshard.strategies.pointwise import names
from fxshard.strategies.registry import register


def cat(call: Call) -> Factors:
    """Operands one after the other along a dim; an operand of shape [0] is skipped, as torch does."""
    (out,) = call.outputs
    assert out is not None
    dim = call.arg(1, "dim", 0) % max(out.ndim, 1)

    def of(meta: TensorMeta, index: int) -> list[str]:
        if meta.ndim != out.ndim:
            return [f"c{index}!"]
        return [f"c{index}!" if d == dim else f"d{d}" for d in range(out.ndim)]

    ins = [of(meta, i) for i, meta in enumerate(call.operands)]
    return factors(ins, [of(out, len(ins))], linear=linear_groups(call, [(0,)], MOVEMENT))


def stack(call: Call) -> Factors:
    """Operands side by side along a new dim."""
    ins = named(call.operands[0].ndim)
    dim = call.arg(1, "dim", 0) % (len(ins) + 1)
    return factors([ins] * len(call.operands), [[*ins[:dim], "k!", *ins[dim:]]], linear=linear_groups(call, [(0,)], MOVEMENT))


def split(call: Call) -> Factors:
    """Pieces of a dim."""
    ndim = call.operands[0].ndim
    dim = call.arg(2, "dim", 0) % ndim
    outs = [[f"o{i}!" if d == dim else f"d{d}" for d in range(ndim)] for i in range(len(call.outputs))]
    return factors([named(ndim, [dim])], outs, linear=linear_groups(call, [(0,)], MOVEMENT))


def unbind(call: Call) -> Factors:
    """One output per index of a dim."""
    ndim = call.operands[0].ndim
    dim = call.arg(1, "dim", 0) % ndim
    ins = named(ndim, [dim])
    out = [n for d, n in enumerate(ins) if d != dim]
    return factors([ins], [out] * len(call.outputs), linear=linear_groups(call, [(0,)], MOVEMENT))


register(names("cat"), cat)
register(names("stack"), stack)
register(names("split.Tensor split_with_sizes chunk unsafe_split.Tensor unsafe_split_with_sizes"), split)
register(names("split_copy.Tensor split_with_sizes_copy"), split)
register(names("unbind.int unbind_copy.int"), unbind)
