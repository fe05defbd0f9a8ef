"""The passes ``constrain``, ``formulate`` and ``choose``: from an annotated graph to a plan.

In: ``Annotated`` and what the user asks for; out: a ``ShardingPlan`` with its bound, and answers about it afterwards (origin.py).
Read constrain.py, formulate.py and choose.py, in the order in which they run; names.py says what a user's names mean.
"""
