"""Rules of operators on the spatial dims of images: convolution, pooling, resampling.

In: calls. Out: factors, and local forms if a rank runs something other than the call. One operator family per file.
"""
