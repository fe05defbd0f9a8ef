"""Plans as data: one spec per node, and the redistributions between them.

In: the solver's choices or a JSON file; out: ``ShardingPlan``, its text, its comparison with another plan, and why it communicates.
Read sharding_plan.py, then plan_json.py and plan_text.py; constraints.py is what a user may ask of a plan.
"""
