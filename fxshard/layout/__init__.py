"""Layouts (one placement per mesh axis) and the redistribution steps between them.

In: a tensor's shape, layouts and a mesh. Out: local shapes and offsets, and the cheapest sequence of steps between two layouts.
Read layouts.py, then steps.py, redistribution.py and folded_paths.py.
"""
