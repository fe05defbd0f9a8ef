"""Fake copies of the model and its arguments, which tracing runs in place of the real ones.

In: the user's model and arguments, on any device; out: CPU fakes of them, with symbols for dynamic sizes and casts for mixed precision.
Read fake_model.py, then symbols.py and mixed_precision.py.
"""
