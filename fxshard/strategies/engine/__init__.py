"""The engine: from rules to strategies.

In: a call and the rule of its operator. Out: ``OpStrategy``, every legal combination of layouts on a mesh.
Read notation.py, factors.py and engine.py, then registry.py.
"""
