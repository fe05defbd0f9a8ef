"""How much longer kernels take than their FLOPs at the data sheet's rate, on a GPU whose architecture is known.

A matrix product of m x n x k in tiles of TILE x TILE, one tile a processor at a time, ends with a wave of tiles that is half empty in the
mean, and starts and ends each tile with DEPTH columns' worth of k in which the tensor cores wait. If there are few tiles, the contracted
dim is split so that all processors have one. Hence, with A = processors TILE^2 / 2 and s parts,

    FLOPs charged = 2 (m n + A / s) (k + s DEPTH),       s = max(1, sqrt(A k / (m n DEPTH)))

for thin products with m and n of at least THIN. What remains is the fraction of the peak that the best shapes reach, times SUSTAINED.
Attention reaches its published rates on long sequences and half of them on a sequence of HALF.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fxshard.graph.call import Call
from fxshard.mesh.architectures import Architecture

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
    "fxshard.sdpa_backward.default": 1,
    "fxshard.block_attention_backward.default": 1,
}
"""Attention -> the operand that is its queries: 1 in the backward."""
PRODUCT = "fxshard.einsum.default"
KERNEL = 2.0
"""Microseconds from the end of one kernel to the work of the next on the device's queue."""


def slowdown(call: Call, inputs: Sequence[tuple[int, ...]], flops: float, dtype: torch.dtype, on: Architecture) -> float:
    """Factor by which an operator on operands of these local shapes exceeds ``flops`` at the data sheet's rate; 1 for pointwise ones."""
    size = dtype.itemsize
    best = on.best.get(size, on.best[2])
    if call.op in ATTENTION:
        queries = ATTENTION[call.op]
        length = inputs[queries + 1][-2]
        return (1 + HALF / max(length, 1)) / (on.backward if queries else on.forward) if size <= 2 else 1 / best
    if call.op == PRODUCT:
        return shape_factor(*sizes(str(call.arg(2)), inputs), on.processors) / best / SUSTAINED
    return 1 / best / SUSTAINED


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
