"""Rules of operators on the space of an image: convolution, pooling, resampling.

In: calls; out: factors, and local forms where a rank runs something else than the call. One family a file.
"""
