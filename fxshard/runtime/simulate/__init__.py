"""All ranks of a program in one process.

In: a program and global values; out: what every rank holds and returns, collectives computed by their definitions.
Read simulate.py; shards.py cuts global tensors, values.py collects them from a model.
"""
