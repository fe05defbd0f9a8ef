"""The pass ``lower``: from a planning graph and its plan to a program.

In: ``PlanningGraph`` and ``ShardingPlan``. Out: ``ShardedProgram`` with one local graph per size class, collectives included. Read lower.py
and local_graph.py, then emit.py and folded.py, which emit the redistributions.
"""
