"""fxshard's own operators: one node each in the planning graph, whatever the device.

``einsum`` stands for every matmul (its equation is its rule), ``sdpa`` for attention, ``dropout`` for its mask and
scaling, ``random`` for every other draw, ``constant`` for small tensors that the model writes out, ``to_local`` and
``from_local`` for the ends of a ``local_map`` region; softmax, cross-entropy and normalisations come in pieces
(``sum_exp``, ``target_score``, ``channel_sum``, ``row_sum``, ...), each right for a part of what is summed; ``axis_index``
is the only node of a lowered graph that knows the rank. ``returned`` and ``assigned`` note what modules
return and what buffers are assigned while a model is traced;
``fxshard_users::triton_kernel`` is a call of a Triton kernel of the user's.
"""

from fxshard._torch_compat.sources import quick_sources

with quick_sources():
    from fxshard.ops import (
        assigned,
        attention,
        contraction,
        creation,
        cross_entropy,
        fakes,
        local_region,
        mesh_ops,
        normalization,
        random,
        returned,
        row_norm,
        softmax,
        user_kernel,
    )

__all__ = [
    "assigned",
    "attention",
    "contraction",
    "creation",
    "cross_entropy",
    "fakes",
    "local_region",
    "mesh_ops",
    "normalization",
    "random",
    "returned",
    "row_norm",
    "softmax",
    "user_kernel",
]
