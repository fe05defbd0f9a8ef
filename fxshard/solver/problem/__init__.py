"""The placement problem and the model that the solver works on.

In: nodes, edges, transfers and rows as numbers; out: ``Model``, a simple graph with integer costs in float64.
Read problem.py, transfers.py and rows.py, then model.py and scaling.py.
"""
