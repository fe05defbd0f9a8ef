"""fxshard's own operators: each is one node of the planning graph, independent of the device.

``einsum`` represents every matmul (its equation is its rule), ``sdpa`` attention, ``flex_attention`` attention whose mask and scores are
functions, ``varlen_attention`` that within packed sequences, ``dropout`` its mask and scaling, ``random`` every other random draw,
``constant`` small literal tensors, ``to_local`` and ``from_local`` the boundaries of a ``local_map`` region, ``placed`` a value whose
layout the model itself names. ``norms/`` has the
operators into which softmax, cross-entropy and normalisations are decomposed (``sum_exp``, ``target_score``, ``channel_sum``,
``row_sum``, ...); each is correct on a shard of the summed dim. ``experts/`` has those of mixtures of experts.

Only local graphs have ``block_attention``, attention to some of the keys; ``merge_attention``, which adds its results up; ``shift``, which
sends a tensor to the next rank of an axis; ``from_host``, which copies a parameter to the device; and ``axis_index``, the only node that
depends on the rank.
``returned``, ``handed_out`` and ``assigned`` record, during a trace, the results of modules and of the model, and the assignments to
buffers. ``fxshard_users::triton_kernel`` calls a user's Triton kernel.
"""

from fxshard._torch_compat.imports.sources import quick_sources

with quick_sources():
    from fxshard.ops import (
        assigned,
        contraction,
        creation,
        fakes,
        host,
        local_region,
        mesh_ops,
        placed,
        random,
        returned,
        user_kernel,
    )
    from fxshard.ops.experts import products, rows
    from fxshard.ops.flex import attention as flex_attention
    from fxshard.ops.flex import fused, varlen
    from fxshard.ops.norms import cross_entropy, normalization, row_norm, softmax
    from fxshard.ops.sdpa import attention, block_attention

__all__ = [
    "assigned",
    "attention",
    "block_attention",
    "contraction",
    "creation",
    "fakes",
    "flex_attention",
    "fused",
    "host",
    "local_region",
    "mesh_ops",
    "placed",
    "products",
    "random",
    "returned",
    "user_kernel",
    "varlen",
    "cross_entropy",
    "normalization",
    "row_norm",
    "rows",
    "softmax",
]
