"""Search where the bound does not meet the best plan: branch and bound, combination of plans, large neighbourhood search.

In: a relaxed model with its bound and plans; out: a better plan or a higher bound.
Read case_split.py, branching.py and search.py.
"""
