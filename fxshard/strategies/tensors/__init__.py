"""Rules of operators on elements and dims: pointwise, reductions, views, slices, joins, indexing, creation.

In: calls; out: factors, and local forms where a rank runs something else than the call. One family a file.
"""
