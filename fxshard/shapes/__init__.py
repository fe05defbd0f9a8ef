"""Sizes as symbols: which dims of a model's inputs are dynamic, and a traced graph at any of their sizes.

In comes what the user says of dims (``dims.py``) and a graph that was traced with symbols for them; out goes, for sizes that are
given, that graph with numbers (``family.py``), and what tracing took for granted (``guards.py``).
Read ``dims.py`` first, then ``family.py``; ``units.py`` says of what sizes must be multiples so that all is cut evenly.
"""

from fxshard.shapes.dims import DynamicDim, dynamic_dims
from fxshard.shapes.family import GraphFamily, instantiated
from fxshard.shapes.guards import Guard, broken, guard_on, guards_of
from fxshard.shapes.units import depends, evaluate_all, units_of

__all__ = [
    "DynamicDim",
    "GraphFamily",
    "Guard",
    "broken",
    "depends",
    "dynamic_dims",
    "evaluate_all",
    "guard_on",
    "guards_of",
    "instantiated",
    "units_of",
]
