"""A program as one rank runs it, before it is compiled.

In: ``ShardedProgram`` and a device mesh; out: the rank's graph in its device's operators, split into forward and backward.
Read bind.py, rank_graph.py and partition.py; common_subexpressions.py, expand_draws.py and in_place.py rewrite the halves.
"""
