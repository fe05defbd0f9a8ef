"""The graph that is planned, and what its calls take and return.

In: an aten graph with fake values on its nodes; out: ``PlanningGraph``, whose inputs and outputs have names, and ``Call``, what a rule
sees of a node. Read planning_graph.py, then call.py; objects.py and side_effects.py describe what a call takes, returns and leaves
beside tensors.
"""
