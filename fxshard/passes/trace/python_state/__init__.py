"""What a forward reads and changes in Python: hooks, attributes, objects among its arguments.

In: a model whose forward does more than return tensors; out: a graph that returns what is to be changed, and notes on where it goes.
Read objects.py, side_effects.py and hooks.py.
"""
