"""Scaled dot-product attention as one node, whole or by blocks of a sharded sequence.

In: q, k and v of a shard; out: the device's kernel, forward and backward. Read attention.py, then block_attention.py.
"""
