"""Joining and splitting along a dim: cat, stack, split, unbind. The dim stays whole, all others can be sharded.

If a dim is sharded over n ranks, rank 0 has its first L / n elements, but 1 / n of each piece would have to be on
rank 0: a piece of a shard is not a shard of the piece, whatever the sizes. There are three exceptions: a piece that
is the whole dim, if all others have no elements; a dim (a b) that a view has split into dims a and b, if pieces are cut or joined
along b; and a packed dim, which is sharded in each of its parts, if the pieces are these parts. Stacking and unbinding have one piece
per index, so the same holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard.graph.call import Call, TensorMeta
from fxshard.strategies.engine.factors import MOVEMENT, Factors, factors, known_equal, linear_groups
from fxshard.strategies.engine.local import LocalContext
from fxshard.strategies.engine.packed import PackedOption, Packs, by_factor
from fxshard.strategies.engine.registry import register, unchanged
from fxshard.strategies.tensors.dims import named
from fxshard.strategies.tensors.pointwise import aten_names


def cat(call: Call) -> Factors:
    """Concatenates operands along a dim; skips operands of shape [0], as torch does.

    If one operand is the whole result and the others have no elements, the dim can be sharded.
    """
    out = call.output
    dim = call.arg(1, "dim", 0) % max(out.ndim, 1)

    def of(meta: TensorMeta, index: int) -> list[str]:
        if meta.ndim != out.ndim:
            return [f"c{index}!"]
        return [_piece(meta, out, d, f"c{index}") if d == dim else f"d{d}" for d in range(out.ndim)]

    ins = [of(meta, i) for i, meta in enumerate(call.operands)]
    outs = [f"d{d}" if d != dim or any(f"d{d}" in dims for dims in ins) else "out!" for d in range(out.ndim)]
    return factors(ins, [outs], linear=linear_groups(call, [(0,)], MOVEMENT))


def _piece(part: TensorMeta, whole: TensorMeta, dim: int, name: str) -> str:
    """The factor of a piece's joined dim: that of the whole tensor if the piece is all of it, else one that stays whole."""
    return f"d{dim}" if known_equal(part.shape[dim], whole.shape[dim]) else f"{name}!"


def stack(call: Call) -> Factors:
    """Stacks operands along a new dim."""
    ins = named(call.operands[0].ndim)
    dim = call.arg(1, "dim", 0) % (len(ins) + 1)
    return factors([ins] * len(call.operands), [[*ins[:dim], "k!", *ins[dim:]]], linear=linear_groups(call, [(0,)], MOVEMENT))


def split(call: Call) -> Factors:
    """Splits a dim; if one piece is all of it, the dim can be sharded."""
    (x,) = call.operands
    dim = call.arg(2, "dim", 0) % x.ndim
    outs = [[_piece(o, x, d, f"o{i}") if d == dim else f"d{d}" for d in range(x.ndim)] for i, o in enumerate(call.outputs) if o is not None]
    ins = named(x.ndim, [] if any(f"d{dim}" in dims for dims in outs) else [dim])
    depends = tuple(() if o is not None and known_equal(o.shape[dim], 0) else (0,) for o in call.outputs)
    return factors([ins], outs, depends=depends, linear=linear_groups(call, [(0,)], MOVEMENT))


def packed_split(call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any]) -> Iterator[PackedOption]:
    """Pieces of a packed dim that are its parts are sharded as usual."""
    yield from by_factor(call, packs, rule, sizes)
    dim = call.arg(2, "dim", 0) % call.operands[0].ndim
    parts = dict(packs[0]).get(dim, ())
    if parts and parts == tuple(o.shape[dim] for o in call.outputs if o is not None) and len(parts) == len(call.outputs):
        yield PackedOption((PackedShard(dim, parts),), (Shard(dim),) * len(parts), parts)


def packed_cat(call: Call, packs: Packs, rule: Factors, sizes: dict[str, Any]) -> Iterator[PackedOption]:
    """Operands that become the parts of a packed dim are sharded as usual."""
    yield from by_factor(call, packs, rule, sizes)
    dim = call.arg(1, "dim", 0) % max(call.output.ndim, 1)
    parts = dict(packs[-1]).get(dim, ())
    if parts and all(o.ndim == call.output.ndim for o in call.operands) and parts == tuple(o.shape[dim] for o in call.operands):
        yield PackedOption((Shard(dim),) * len(parts), (PackedShard(dim, parts),), parts)


def local_split(ctx: LocalContext) -> Any:
    """Splits the shard into pieces of local sizes."""
    dim = ctx.call.arg(2, "dim", 0) % ctx.call.operands[0].ndim
    if not ctx.inputs[0].held_on(dim):
        return unchanged(ctx)
    lengths = [ctx.output_shape(i)[dim] for i in range(len(ctx.call.outputs))]
    return ctx.emit(torch.ops.aten.split_with_sizes.default, ctx.args[0], lengths, dim)


def unbind(call: Call) -> Factors:
    """One output per index of a dim."""
    ndim = call.operands[0].ndim
    dim = call.arg(1, "dim", 0) % ndim
    ins = named(ndim, [dim])
    out = [n for d, n in enumerate(ins) if d != dim]
    return factors([ins], [out] * len(call.outputs), linear=linear_groups(call, [(0,)], MOVEMENT))


register(aten_names("cat"), cat, packed=packed_cat)
register(aten_names("stack"), stack)
register(
    aten_names("split.Tensor split_with_sizes chunk unsafe_split.Tensor unsafe_split_with_sizes"),
    split,
    local=local_split,
    packed=packed_split,
)
register(aten_names("split_copy.Tensor split_with_sizes_copy"), split, local=local_split, packed=packed_split)
register(aten_names("unbind.int unbind_copy.int"), unbind)
