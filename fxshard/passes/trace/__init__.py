"""The pass ``trace``: from a model and its arguments to a planning graph.

In: an ``nn.Module`` and example arguments; out: ``PlanningGraph``, forward or joint forward and backward, on fakes.
Read trace.py, then the packages in the order in which it calls them: fakes, functions, python_state, repeats, rewrites.
"""
