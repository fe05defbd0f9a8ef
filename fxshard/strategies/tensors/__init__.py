"""Rules of operators on elements and dims: pointwise, reductions, views, slices, joins, indexing, creation.

In: calls. Out: factors, and local forms if a rank runs something other than the call. One operator family per file.
"""
