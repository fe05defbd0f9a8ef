"""Dynamic sizes: which dims of a model's inputs are dynamic, and a traced graph at any of their sizes.

In: the user's description of the dims (``dims.py``) and a graph traced with symbols for them. Out: that graph at given sizes
(``family.py``), and the conditions on sizes that tracing assumed (``guards.py``). ``ties.py`` finds a dim that the user forgot to name.
Read ``dims.py`` first, then ``family.py``; ``units.py`` computes the multiples that make all shards even, ``weighted.py`` reads the sizes
for which a plan is optimised.
"""

from fxshard.shapes.bounds import Bounds, bounds_of
from fxshard.shapes.dims import DynamicDim, Ranged, dynamic_dims
from fxshard.shapes.family import GraphFamily, instantiated
from fxshard.shapes.guards import Guard, determined_by, distinct, first_broken, guards_of, guards_on
from fxshard.shapes.ties import fixes_jointly, tie_remedy
from fxshard.shapes.units import depends_on, evaluate_all, range_in_units, units_of
from fxshard.shapes.weighted import WeightedSizes, largest_sizes, sizes_named, weighted_sizes

__all__ = [
    "DynamicDim",
    "GraphFamily",
    "Guard",
    "Ranged",
    "Bounds",
    "bounds_of",
    "WeightedSizes",
    "fixes_jointly",
    "first_broken",
    "range_in_units",
    "depends_on",
    "dynamic_dims",
    "evaluate_all",
    "distinct",
    "guards_on",
    "guards_of",
    "instantiated",
    "largest_sizes",
    "tie_remedy",
    "determined_by",
    "sizes_named",
    "units_of",
    "weighted_sizes",
]
