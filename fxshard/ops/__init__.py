"""fxshard's own operators: one node each in the planning graph, whatever the device.

``einsum`` stands for every matmul (its equation is its rule), ``sdpa`` for attention, ``dropout`` for its mask and
scaling; ``axis_index`` is the only node of a lowered graph that knows the rank.
"""

from fxshard.ops import attention, contraction, mesh_ops, random

__all__ = ["attention", "contraction", "mesh_ops", "random"]
