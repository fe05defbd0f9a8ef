"""What torch functions become while a model is traced.

In: calls of torch functions and operators; out: operators with a rule of their own, one node each, on which every sharding is exact.
Read decompose.py and neutralise.py, which list them; each other file is one family of functions.
"""
