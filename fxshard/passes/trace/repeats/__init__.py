"""Layers that are alike are traced once, see decision 0035.

In: a captured graph in which alike layers are stubs; out: the joint graph that tracing every layer would give.
Read repeated.py, then shorten.py (before AOTAutograd) and unroll.py (after it).
"""
