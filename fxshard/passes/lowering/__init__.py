"""The pass ``lower``: from a planning graph and its plan to a program.

In: ``PlanningGraph`` and ``ShardingPlan``; out: ``ShardedProgram``, one local graph per size class, with its collectives.
Read lower.py and local_graph.py, then emit.py and folded.py, which write the redistributions.
"""
