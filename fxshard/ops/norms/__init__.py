"""Softmax, cross-entropy and normalisations, decomposed into operators that are correct on shards of the summed dim.

In: a rank's shards. Out: partial sums, or results computed from reduced sums, so that the summed dim can be sharded.
Read softmax.py first, then cross_entropy.py, normalization.py and row_norm.py.
"""
