"""Infeasible problems: the smallest feasible limit, and explanations of conflicts.

In: a problem with limits; out: the smallest feasible limit with its lower bound, or a small set of nodes that conflict.
Read least.py, then conflicts.py.
"""
