"""Plans as data: one spec per node, and the redistributions between them.

In: the solver's choices or a JSON file. Out: ``ShardingPlan``, its text, its comparison with another plan, and the reasons for its
collectives. Read sharding_plan.py, then plan_json.py and plan_text.py; constraints.py defines what a user may require of a plan.
"""
