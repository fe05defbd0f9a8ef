"""Lower bounds: message passing, Lagrange multipliers of rows, cutting planes, and pruning by reduced costs.

In: a model; out: a reparameterised model, a lower bound, and the states and pairs that no better plan uses.
Read sweeps.py and bounds.py, then relax.py, pruning.py and write_out.py.
"""
