"""Rules of contractions: matmul, attention, experts, embedding, linear algebra.

In: calls. Out: factors, and local forms if a rank runs something other than the call. One operator family per file.
"""
