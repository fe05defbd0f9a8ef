"""Primal methods: greedy, local search, large neighbourhood search and HiGHS.

In: a model; out: a plan, an optimal one where the method is exact.
Read local_search.py; the loops are compiled in local_search_kernels.py.
"""
