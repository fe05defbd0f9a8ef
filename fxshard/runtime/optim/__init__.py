"""Optimisers, gradient clipping and gradient scaling on DTensors.

In: torch's own optimisers and scalers. Out: the same steps on local shards, agreed on by all ranks. Each file can be read by itself.
"""
