"""Private names of torch for symbolic sizes: symbols and their environment, expressions, minima and maxima, divisions, guards.

Read symbols.py, then expressions.py.
"""
