"""The passes ``constrain``, ``formulate`` and ``choose``: from an annotated graph to a plan.

In: ``Annotated`` and the user's constraints. Out: a ``ShardingPlan`` with its bound; origin.py answers questions about it later. Read
constrain.py, formulate.py and choose.py, in the order in which they run; names.py resolves the user's names.
"""
