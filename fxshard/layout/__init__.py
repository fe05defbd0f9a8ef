"""Layouts, one placement per mesh axis, and the steps from one layout to another.

In: a tensor's shape, a layout and a mesh; out: local shapes and offsets, and the cheapest sequence of collectives between two layouts.
Read layouts.py, then steps.py, redistribution.py and detours.py.
"""
