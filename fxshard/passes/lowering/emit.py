"""Emits redistribution steps into a local graph: collectives on buffers of ceil size, cut back to the rank's own sizes.

Every dim is padded to its ceil size, so all ranks issue the same collectives with the same shapes; even shards need no padding or cutting.
Until the program is bound, mesh axis names stand for process groups.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard

from fxshard._torch_compat.dtensor.packed import PackedShard
from fxshard._torch_compat.sizes.symbols import surely
from fxshard.layout.layouts import Layout, ceil_shape, chunk
from fxshard.layout.redistribution import LOCAL_STEPS, Step, exchange_shape
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.folded import FoldedStep, emit_folded_step
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.packed import packed_chunk, packed_for_ranks, unpacked
from fxshard.passes.lowering.shaping import (
    MANY,
    adjoin,
    alike,
    at_once,
    contiguous,
    cut_to,
    joined,
    joint,
    pad_to,
    piece,
    side_by_side,
    stacked,
    wait,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def emit_step(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node | None]:
    """Applies ``step`` to ``x``, the local tensor in ``layout`` of a tensor with global ``shape``; returns (result, collective node)."""
    value = x.meta["val"]
    if step.kind in LOCAL_STEPS or not (value.dtype == torch.bool or value.is_complex()):
        return _emit(local, x, step, layout, shape)
    if value.is_complex():
        return _emit_in_pairs(local, x, step, layout, shape)
    # Bools travel as bytes: Inductor promotes a collective's bool operand with its integer arguments, to int64.
    as_bytes = local.emit(aten._to_copy.default, x, dtype=torch.uint8)
    result, collective = _emit(local, as_bytes, step, layout, shape)
    return local.emit(aten._to_copy.default, result, dtype=torch.bool), collective


def _emit_in_pairs(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node | None]:
    """Complex numbers travel as pairs of real ones, along one more dim: gloo's all-to-all takes no others."""
    pairs = local.emit(aten.view_as_real.default, local.emit(aten.resolve_conj.default, x))
    result, collective = _emit(local, pairs, step, layout, (*shape, 2))
    own = local.emit(aten.clone.default, result, memory_format=torch.contiguous_format)  # in a bucket it may start at an odd place
    return local.emit(aten.view_as_complex.default, own), collective


def takes_all_at_once(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether a step cuts a dim into so many chunks that it handles them all at once; sizes must be numbers."""
    after = step.after(layout)
    if layout.is_folded or after.is_folded:
        return FoldedStep(step, layout, shape, mesh, (0,) * mesh.ndim).at_once
    return bool(step.dims) and step.is_collective and mesh.shape[step.axis] > MANY


def _emit(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node | None]:
    if layout.is_folded or step.after(layout).is_folded:
        return emit_folded_step(local, x, FoldedStep(step, layout, shape, local.mesh, local.coordinate))
    return _EMIT[step.kind](local, x, step, layout, shape)


def _shapes(
    local: LocalGraph, step: Step, layout: Layout, shape: tuple[int, ...]
) -> tuple[Layout, tuple[int, ...], tuple[int, ...], str, int]:
    """(layout after, ceil shape before, ceil shape after, group, group size)."""
    after = step.after(layout)
    mesh = local.mesh
    return (
        after,
        ceil_shape(shape, layout, mesh.shape),
        ceil_shape(shape, after, mesh.shape),
        mesh.axis_names[step.axis],
        mesh.shape[step.axis],
    )


def _reduce_op(step: Step) -> tuple[str, bool]:
    """(op of the collective, whether to divide its result by the group size): a mean is computed as a sum."""
    assert isinstance(step.source, Partial)
    op = step.source.reduce_op
    return ("sum", True) if op == "avg" else (op, False)


def _mean(local: LocalGraph, x: fx.Node, divide: bool, n: int) -> fx.Node:
    return local.emit(aten.div.Tensor, x, n) if divide else x


def all_reduce(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
    after, before_ceil, _, group, n = _shapes(local, step, layout, shape)
    op, divide = _reduce_op(step)
    collective = local.emit(c10d.all_reduce.default, contiguous(local, pad_to(local, x, before_ceil)), op, group)
    result = cut_to(local, wait(local, collective), local.local_shape(shape, after))
    return _mean(local, result, divide, n), collective


def all_gather(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
    """The gathered pieces are stacked on dim 0; unless they adjoin, each is cut to its length and concatenated along the sharded dim."""
    assert isinstance(step.source, Shard | PackedShard)
    dim = step.source.dim
    after, before_ceil, _, group, n = _shapes(local, step, layout, shape)
    collective = local.emit(c10d.all_gather_into_tensor.default, contiguous(local, pad_to(local, x, before_ceil)), n, group)
    gathered = wait(local, collective)
    result = local.local_shape(shape, after)
    if isinstance(step.source, PackedShard):
        return unpacked(local, gathered, step.source, before_ceil, n, result), collective
    if adjoin(result, dim) and alike(joint(before_ceil, dim, n), result):
        return (local.emit(aten.view.default, gathered, result) if dim else gathered), collective
    if at_once(result[dim], n):
        return side_by_side(local, local.emit(aten.view.default, gathered, [n, *before_ceil]), result, dim), collective
    blocks = [piece(local, gathered, 0, i * before_ceil[0], before_ceil[0]) for i in range(n)]
    return joined(local, blocks, result, dim), collective


def reduce_scatter(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
    """The piece for each rank is padded to ceil size; the pieces are stacked on dim 0."""
    assert isinstance(step.target, Shard | PackedShard)
    dim = step.target.dim
    after, _, after_ceil, group, n = _shapes(local, step, layout, shape)
    op, divide = _reduce_op(step)
    if isinstance(step.target, PackedShard):
        buffer = packed_for_ranks(local, x, step.target, after_ceil, n)
    else:
        buffer = x if _is_stack(local, x, dim, n, after_ceil) else _stack_pieces(local, x, dim, n, after_ceil)
        if buffer is x and dim:
            buffer = local.emit(aten.view.default, contiguous(local, x), joint(after_ceil, 0, n))
    collective = local.emit(c10d.reduce_scatter_tensor.default, contiguous(local, buffer), op, n, group)
    result = cut_to(local, wait(local, collective), local.local_shape(shape, after))
    return _mean(local, result, divide, n), collective


def _is_stack(local: LocalGraph, x: fx.Node, dim: int, n: int, block: tuple[int, ...]) -> bool:
    """Whether the blocks for n ranks that ``dim`` of ``x`` is cut into are consecutive parts of it, without padding."""
    shape = local.shape(x)
    return adjoin(shape, dim) and alike(shape, joint(block, dim, n))


def _stack_pieces(local: LocalGraph, x: fx.Node, dim: int, n: int, block: tuple[int, ...]) -> fx.Node:
    size = local.shape(x)[dim]
    if at_once(size, n):
        return local.emit(aten.view.default, contiguous(local, stacked(local, x, dim, n, block)), [n * block[0], *block[1:]])
    pieces = [pad_to(local, piece(local, x, dim, *chunk(size, n, i)), block) for i in range(n)]
    return local.emit(aten.cat.default, pieces, 0)


def all_to_all(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node]:
    """Sends each rank its block (own shard of the old dim, a chunk of the new dim); concatenates the received blocks along the old dim.
    Blocks that adjoin in memory need no copies."""
    assert isinstance(step.source, Shard) and isinstance(step.target, Shard)
    old, new = step.source.dim, step.target.dim
    after, _, _, group, n = _shapes(local, step, layout, shape)
    block = exchange_shape(step, layout, shape, local.mesh)
    size = local.shape(x)[new]
    if _is_stack(local, x, new, n, block):
        sent = local.emit(aten.view.default, contiguous(local, x), [n, *block])
    elif at_once(size, n):
        sent = contiguous(local, stacked(local, x, new, n, block))
    else:
        sent = local.emit(aten.stack.default, [pad_to(local, piece(local, x, new, *chunk(size, n, i)), block) for i in range(n)])
    collective = local.emit(c10d.all_to_all_single.default, sent, [1] * n, [1] * n, group)
    arrived = wait(local, collective)
    result = local.local_shape(shape, after)
    if adjoin(result, old) and alike(joint(block, old, n), result):
        return local.emit(aten.view.default, arrived, result), collective
    if at_once(result[old], n):
        return side_by_side(local, arrived, result, old), collective
    return joined(local, [local.emit(aten.select.int, arrived, 0, i) for i in range(n)], result, old), collective


def slice_step(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, None]:
    """Takes the rank's chunk; its start is a run-time value."""
    if isinstance(step.target, PackedShard):
        return packed_chunk(local, x, step.target, step.axis), None
    assert isinstance(step.target, Shard)
    dim = step.target.dim
    size = local.shape(x)[dim]
    length = chunk(size, local.mesh.shape[step.axis], local.coordinate[step.axis])[1]
    if surely(length == size):
        return x, None
    positions = local.emit(aten.arange.default, length, dtype=torch.int64)
    indexes = local.emit(aten.add.Tensor, positions, local.start(size, step.axis))
    return local.emit(aten.index_select.default, x, dim, indexes), None


def to_partial(local: LocalGraph, x: fx.Node, step: Step, layout: Layout, shape: tuple[int, ...]) -> tuple[fx.Node, None]:
    """The first rank keeps the value, the others hold the neutral element; with avg, max or min all ranks keep it."""
    assert isinstance(step.target, Partial)
    neutral = {"sum": 0, "product": 1}.get(step.target.reduce_op)
    if neutral is None:
        return x, None
    first = local.emit(aten.eq.Scalar, local.axis_index(step.axis), 0)
    truth = x.meta["val"].dtype == torch.bool  # beside a number, the result of where would be numbers
    return local.emit(aten.where.ScalarOther, first, x, bool(neutral) if truth else neutral), None


_EMIT = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "slice": slice_step,
    "to_partial": to_partial,
}
