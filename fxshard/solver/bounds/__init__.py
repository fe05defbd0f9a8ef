"""Bounds: message passing, Lagrange multipliers of rows, cutting planes, and what a bound rules out.

In: a model; out: a reparameterised model, a lower bound, and the states and pairs that no better plan has.
Read sweeps.py and bounds.py, then relax.py and pruning.py.
"""
