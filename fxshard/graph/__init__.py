"""The graph that the planner works on, and the values that calls of it take and return.

In: an aten graph with fake values on its nodes; out: ``PlanningGraph``, with named inputs and outputs, and ``Call``, a rule's view of a
node. Read planning_graph.py, then call.py. objects.py describes arguments and results that are not tensors, side_effects.py the
attributes that a call changes, json_values.py writes arguments of calls as JSON.
"""
