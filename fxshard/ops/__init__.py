"""fxshard's own operators: one node each in the planning graph, whatever the device.

``einsum`` stands for every matmul (its equation is its rule), ``sdpa`` for attention, ``dropout`` for its mask and
scaling, ``random`` for every other draw, ``constant`` for small tensors that the model writes out, ``to_local`` and
``from_local`` for the ends of a ``local_map`` region. ``norms/`` has the operators into which softmax, cross-entropy and
normalisations are decomposed (``sum_exp``, ``target_score``, ``channel_sum``, ``row_sum``, ...), each correct for a part of what is
summed. ``axis_index`` is the only node of a lowered graph that knows the rank. ``returned`` and ``assigned`` record, during a trace,
what modules return and which buffers are assigned. ``fxshard_users::triton_kernel`` is a call of a user's Triton kernel.
"""

from fxshard._torch_compat.sources import quick_sources

with quick_sources():
    from fxshard.ops import (
        assigned,
        attention,
        contraction,
        creation,
        fakes,
        local_region,
        mesh_ops,
        random,
        returned,
        user_kernel,
    )
    from fxshard.ops.norms import cross_entropy, normalization, row_norm, softmax

__all__ = [
    "assigned",
    "attention",
    "contraction",
    "creation",
    "fakes",
    "local_region",
    "mesh_ops",
    "random",
    "returned",
    "user_kernel",
    "cross_entropy",
    "normalization",
    "row_norm",
    "softmax",
]
