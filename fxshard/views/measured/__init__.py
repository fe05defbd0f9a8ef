"""A measured step beside the predicted one.

In: the events of a profiler's trace and a predicted timeline. Out: the step on its axes, a table and a trace. Read step.py, then
span_axes.py.
"""
