"""Python state that a forward reads and changes: hooks, attributes, objects among its arguments.

In: a model whose forward has side effects; out: a graph that returns the new values, and a description of where to store them.
Read objects.py, side_effects.py and hooks.py.
"""
