"""Softmax, cross-entropy and normalisations as operators that are each correct for a part of what they sum.

In: tensors of one rank or of one device; out: partial sums, or results finished from reduced sums, so that the summed dim may be sharded.
Read softmax.py first, then cross_entropy.py, normalization.py and row_norm.py.
"""
