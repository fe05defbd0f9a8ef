"""The pass ``annotate``: the legal specs of every node, and what the planner asks of an annotated graph.

In: a planning graph and a mesh; out: ``Annotated``: specs per node, prices, lifetimes and what communication hides behind.
Read annotate.py, then lifetimes.py, overlap.py and prices.py; verify.py checks graphs and plans against their specs.
"""
