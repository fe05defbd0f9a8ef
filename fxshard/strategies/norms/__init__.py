"""Rules of normalisations, softmax and losses.

In: calls; out: factors, and local forms where a rank runs something else than the call. One family a file.
"""
