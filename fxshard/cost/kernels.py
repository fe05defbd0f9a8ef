"""How much longer kernels take than their FLOPs at the data sheet's rate, on a GPU whose architecture is known.

A matrix product of m x n x k in tiles of TILE x TILE, one tile a processor at a time, ends with a wave of tiles that is half empty in the
mean, and starts and ends each tile with DEPTH columns' worth of k in which the tensor cores wait. If there are few tiles, the contracted
dim is split so that all processors have one. Hence, with A = processors TILE^2 / 2 and s parts,

    FLOPs charged = 2 (m n + A / s) (k + s DEPTH),       s = max(1, sqrt(A k / (m n DEPTH)))

for thin products with m and n of at least THIN. What remains is the fraction of the peak that the best shapes reach, times SUSTAINED.
Attention reaches its published rates on long sequences and half of them on a sequence of HALF; so does ``flex_attention`` where Inductor
makes a fused kernel of it; else it runs products in float32, block by block. A grouped product is a batch of products with rows shared
out equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxshard.graph.call import Call
from fxshard.mesh.architectures import Architecture
from fxshard.ops.flex.fused import reason_against

TILE, DEPTH, THIN = 128, 128, 64
"""Sizes of cuBLAS's tiles; the columns of k that a pipeline of four stages of 32 loads before its first product; the thinnest tile."""
SUSTAINED = 0.67
"""Rate of products in a training step over that of the best shapes alone: power and temperature lower the clocks, and operands are not in
the cache. Fitted to the steps of ``bench.published``, one number for all architectures."""
HALF = 512
"""Length of a sequence at which attention reaches half of its rate (FlashAttention-2, Dao, 2023, figures 4 to 7: A100, causal)."""
ATTENTION = {
    "fxshard.sdpa.default": 0,
    "fxshard.block_attention.default": 0,
    "fxshard.varlen_attention.default": 0,
    "fxshard.flex_attention.default": 0,
    "fxshard.sdpa_backward.default": 1,
    "fxshard.block_attention_backward.default": 1,
    "fxshard.varlen_attention_backward.default": 1,
    "fxshard.flex_attention_backward.default": 1,
}
"""Attention -> the argument that is its queries: 1 in the backward, of ``flex_attention`` the one after a gradient of logsumexp."""
LONGEST = {"fxshard.varlen_attention.default": 7, "fxshard.varlen_attention_backward.default": 9}
"""The argument that is the length of the longest sequence, where sequences are packed and no dim says it."""
FLEX = ("fxshard.flex_attention.default", "fxshard.flex_attention_backward.default")
"""Attention that outside a fused kernel computes its products in float32 whatever the dtype of its operands (float64 stays)."""
PRODUCT = "fxshard.einsum.default"
LINEAR, OUTER = "fxshard.expert_linear.default", "fxshard.expert_outer.default"
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
KERNEL = 2.0
"""Microseconds from the end of one kernel to the work of the next on the device's queue."""


Shape = tuple[int, ...]


def slowdown(call: Call, inputs: Sequence[Shape], outputs: Sequence[Shape], dtype: torch.dtype, on: Architecture) -> float:
    """Factor by which an operator on operands and results of these local shapes exceeds its FLOPs at the data sheet's rate for ``dtype``.

    Operators without products have the factor of the best products, and are bound by memory.
    """
    size = dtype.itemsize
    best = on.best.get(size, on.best[2])
    if _is_fused(call):
        length = _length(call, inputs, _queries(call))
        return (1 + HALF / max(length, 1)) / (on.backward if ATTENTION[call.op] else on.forward) if size <= 2 else 1 / best
    batched = _batched(call, inputs, outputs)
    return (shape_factor(*batched, on.processors) if batched else 1.0) / best / SUSTAINED


def product_dtype(call: Call, dtype: torch.dtype, on: Architecture | None) -> torch.dtype:
    """The dtype in which an operator on operands of ``dtype`` computes its products, on a GPU of a known architecture or elsewhere."""
    unfused = call.op in FLEX and (on is None or not _is_fused(call))
    return torch.float32 if unfused and dtype.itemsize < 4 else dtype


def _is_fused(call: Call) -> bool:
    """Whether an operator is attention in a fused kernel on a GPU."""
    if call.op not in FLEX:
        return call.op in ATTENTION
    first = _queries(call)
    return reason_against(*call.operands[first : first + 3]) is None


def _queries(call: Call) -> int:
    """The operand that is the queries of an attention."""
    first = ATTENTION[call.op]
    return first + (call.op in FLEX and first == 1 and call.meta(1) is not None)


def _length(call: Call, inputs: Sequence[Shape], queries: int) -> int:
    """Keys that a query may see."""
    if call.op not in LONGEST:
        return inputs[queries + 1][-2]
    longest, keys = call.arg(LONGEST[call.op]), inputs[queries + 1][0]
    return min(longest, keys) if isinstance(longest, int) else keys


def _batched(call: Call, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of an operator that is a batch of equal products, if it is one."""
    if call.op == PRODUCT:
        return sizes(str(call.arg(2)), inputs)
    if call.op in (LINEAR, OUTER):
        groups, m, n = inputs[1] if call.op == LINEAR else outputs[0]
        whole = (call.operands[1] if call.op == LINEAR else call.outputs[0]).shape[0]  # type: ignore[union-attr]  # the first result and operands of these operators are tensors
        rows = max(1, math.prod(inputs[0][:2]) // whole)
        return (groups, rows, n, m) if call.op == LINEAR else (groups, m, n, rows)
    return _grouped(call, inputs, outputs[0]) if call.op in GROUPED else None


def _grouped(call: Call, inputs: Sequence[Shape], out: Shape) -> tuple[int, int, int, int]:
    """Of ``aten._grouped_mm``: of rows of a, of columns of b, of the contracted dim, or none. A rank has the same share of the grouped dim
    as of the groups."""
    a, b = (meta.shape for meta in call.operands[:2])
    if len(b) == 3:
        groups, k, n = inputs[1]
        return groups, inputs[0][1] if len(a) == 3 else max(1, a[0] // b[0]), n, k
    if len(a) == 3:
        groups, m, k = inputs[0]
        return groups, m, b[1] // a[0], k
    return (*out, a[1] // call.outputs[0].shape[0])  # type: ignore[union-attr, return-value]  # likewise


def sizes(equation: str, inputs: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of an einsum of two operands: the sizes of dims in all three, in the first and result, second and result, in
    both."""
    operands, result = equation.split("->")
    left, right = operands.split(",")
    extents = dict(zip(left, inputs[0], strict=True))
    for letter, size in zip(right, inputs[1], strict=True):
        extents[letter] = min(size, extents.get(letter, size))
    batch = math.prod(extents[c] for c in left if c in right and c in result)
    m, n = (math.prod(extents[c] for c in one if c not in other) for one, other in ((left, right), (right, left)))
    return batch, m, n, math.prod(extents[c] for c in left if c in right and c not in result)


def shape_factor(batch: int, m: int, n: int, k: int, processors: int) -> float:
    """FLOPs charged over FLOPs of ``batch`` products of m x n x k."""
    flops = batch * m * n * k
    if not flops:
        return 1.0
    area, wave = batch * max(m, THIN) * max(n, THIN), processors * TILE * TILE / 2
    parts = max(1.0, math.sqrt(wave * k / (area * DEPTH)))
    return (area + wave / parts) * (k + parts * DEPTH) / flops
