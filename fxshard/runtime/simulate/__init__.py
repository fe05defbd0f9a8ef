"""All ranks of a program in one process.

In: a program and global values; out: the values and results of every rank; collectives are computed by their definitions.
Read simulate.py; shards.py cuts global tensors, values.py collects them from a model.
"""
