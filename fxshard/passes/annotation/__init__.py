"""The pass ``annotate``: the legal specs of every node, with the prices, lifetimes and overlap that the planner needs.

In: a planning graph and a mesh; out: ``Annotated``. Read annotate.py, then lifetimes.py, overlap.py and prices.py; verify.py checks
graphs and plans against their specs.
"""
