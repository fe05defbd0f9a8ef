"""Sizes as symbols: which dims of a model's inputs are dynamic, and a traced graph at any of their sizes.

In comes what the user says of dims (``dims.py``) and a graph that was traced with symbols for them; out goes, for sizes that are
given, that graph with numbers (``family.py``), and what tracing took for granted (``guards.py``); ``ties.py`` finds the dim that a user
forgot to name.
Read ``dims.py`` first, then ``family.py``; ``units.py`` says of what sizes must be multiples so that all is cut evenly, ``weighted.py`` at
which sizes a plan is to be good.
"""

from fxshard.shapes.dims import DynamicDim, dynamic_dims
from fxshard.shapes.family import GraphFamily, instantiated
from fxshard.shapes.guards import Guard, broken, distinct, guards_of, guards_on, settled_by
from fxshard.shapes.ties import bounds_all, remedy_of
from fxshard.shapes.units import counted_range, depends, evaluate_all, units_of
from fxshard.shapes.weighted import WeightedSizes, largest_sizes, sizes_named, weighted_sizes

__all__ = [
    "DynamicDim",
    "GraphFamily",
    "Guard",
    "WeightedSizes",
    "bounds_all",
    "broken",
    "counted_range",
    "depends",
    "dynamic_dims",
    "evaluate_all",
    "distinct",
    "guards_on",
    "guards_of",
    "instantiated",
    "largest_sizes",
    "remedy_of",
    "settled_by",
    "sizes_named",
    "units_of",
    "weighted_sizes",
]
