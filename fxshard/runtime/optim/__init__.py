"""Optimisers, gradient clipping and scaling on DTensors.

In: torch's own optimisers and scalers; out: the same steps on local shards, agreed on by all ranks.
Every file stands alone.
"""
