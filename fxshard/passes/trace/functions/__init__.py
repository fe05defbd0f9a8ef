"""Replacements for torch functions while a model is traced.

In: calls of torch functions and operators; out: operators that have a rule, one node each, for which every sharding is exact.
Read decompose.py and neutralise.py, which list the replacements; each other file covers one family of functions.
"""
