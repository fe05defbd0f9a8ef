"""fxshard's own operators: one node each in the planning graph, whatever the device.

``einsum`` stands for every matmul (its equation is its rule), ``sdpa`` for attention, ``dropout`` for its mask and
scaling, ``random`` for every other draw, ``constant`` for small tensors that the model writes out; ``axis_index`` is the
only node of a lowered graph that knows the rank.
"""

from fxshard.ops import attention, contraction, creation, mesh_ops, random

__all__ = ["attention", "contraction", "creation", "mesh_ops", "random"]
