"""Problems with limits: the least that a row can be, and why nothing fits.

In: a model with limited rows; out: the least fullest row with its bound, or a small set of nodes that conflict.
Read least.py, then conflicts.py.
"""
