"""What is changed in a graph after it was captured.

In: a captured or joint graph; out: the same graph without memory strides, Python numbers, tokens and constants that are no nodes.
The files do not depend on each other, but for probe.py, which tells what a captured graph returns.
"""
