"""Rewrites of a captured or joint graph into the form of a planning graph.

In: a captured or joint graph; out: the same graph without memory strides, Python numbers, effect tokens and tensor attributes.
The files are independent of each other, except that constants.py uses probe.py, which runs a captured graph on fakes.
"""
