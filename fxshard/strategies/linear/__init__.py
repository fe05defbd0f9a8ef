"""Rules of contractions: matmul, attention, experts, embedding, linear algebra.

In: calls; out: factors, and local forms where a rank runs something else than the call. One family a file.
"""
