"""Repeated layers are traced once, see decision 0035.

In: a captured graph in which repeated layers are stubs; out: the joint graph that tracing every layer would give.
Read repeated.py, then shorten.py (before AOTAutograd) and unroll.py (after it).
"""
