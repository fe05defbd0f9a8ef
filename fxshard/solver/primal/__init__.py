"""Plans: greedy, local search, large-neighbourhood search, exact elimination and HiGHS.

In: a model; out: a plan of it, the best where the method is exact.
Read local_search.py; the loops are compiled in local_search_kernels.py.
"""
