"""Fakes of the model and of its arguments, which tracing runs instead of the real ones.

In: the user's model and arguments, on any device; out: the same on CPU fakes, with symbols for dynamic sizes and casts for mixed precision.
Read fake_model.py, then symbols.py and mixed_precision.py.
"""
