"""Memory of plans: what a plan holds over time, and bounds on what any plan holds.

In: an annotated graph and specs. Out: bytes over the steps of the graph, as rows of the placement problem or as a plan's memory profile.
Read memory_use.py and workspace.py, then memory_over_time.py and memory_lower_bound.py.
"""
