"""The sizes, given by the user with weights, over which the cost of a plan is averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxshard.errors import OptionError, a_kind, closest
from fxshard.shapes.dims import DynamicDim
from fxshard.shapes.guards import Guard, first_broken

WHERE = "example_sizes"
REMEDY = "give sizes in the order of the dynamic dims, or by name, [(8, 2048), {'batch': 64, 'seq': 1}], or pairs of these and weights"


@dataclass(frozen=True)
class WeightedSizes:
    """``sizes`` of all dynamic dims, by name, and their weight in the mean; the weights of all samples add up to 1."""

    sizes: tuple[tuple[str, int], ...]
    weight: float

    def __str__(self) -> str:
        return f"{self.weight:.4g} at {sizes_named(self.sizes)}"


def sizes_named(sizes: Mapping[str, int] | Sequence[tuple[str, int]]) -> str:
    """``batch=8, seq=2048``."""
    pairs = sizes.items() if isinstance(sizes, Mapping) else sizes
    return ", ".join(f"{name}={size}" for name, size in pairs)


def weighted_sizes(given: Any, dims: Sequence[DynamicDim]) -> tuple[WeightedSizes, ...]:
    """Reads the user's sizes of ``dims``, none for None. Weights are normalised to add up to 1; without weights all are equal.

    ``given``: a sequence of sizes, or of pairs of sizes and a weight. Sizes are a tuple in the order of ``dims``, or a mapping by name, in
    which missing sizes are the example's. Raises OptionError for anything else, and for a size outside its dim's range.
    """
    if given is None:
        return ()
    if not dims:
        what = "example_sizes gives sizes of dynamic dims, and there are none"
        raise OptionError(what, where=WHERE, remedy="name them in dynamic_shapes")
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or not given:
        raise OptionError(f"cannot read example_sizes, {a_kind(given)}: {given!r:.60}", where=WHERE, remedy=REMEDY)
    found = [_entry(one, dims) for one in given]
    weights = [weight for _, weight in found if weight is not None]
    if len(weights) not in (0, len(found)):
        raise OptionError("some of the sizes have a weight, others have none", where=WHERE, remedy="give all of them one, or none")
    if len({sizes for sizes, _ in found}) < len(found):
        twice = next(sizes for k, (sizes, _) in enumerate(found) if any(sizes == other for other, _ in found[:k]))
        raise OptionError(f"{sizes_named(twice)} is given twice", where=WHERE, remedy="give it once, with the weight of both")
    total = math.fsum(weights) or float(len(found))
    return tuple(WeightedSizes(sizes, (1.0 if weight is None else weight) / total) for sizes, weight in found)


def _entry(one: Any, dims: Sequence[DynamicDim]) -> tuple[tuple[tuple[str, int], ...], float | None]:
    """(sizes of all dims, their weight)."""
    sizes, weight = one, None
    if isinstance(one, Sequence) and not isinstance(one, str) and len(one) == 2 and isinstance(one[0], (Mapping, Sequence)):
        sizes, weight = one
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise OptionError(f"the weight of {sizes!r:.60} is {weight!r:.30}", where=WHERE, remedy="give a number greater than 0")
    return tuple(_sizes(sizes, dims)), None if weight is None else float(weight)


def _sizes(given: Any, dims: Sequence[DynamicDim]) -> Iterator[tuple[str, int]]:
    names = [dim.name for dim in dims]
    if isinstance(given, Mapping):
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            what = f"there is no dynamic dim {unknown!r}{closest(str(unknown), names)}"
            raise OptionError(what, where=WHERE, remedy=f"the dynamic dims are {', '.join(names)}")
        named = {dim.name: given.get(dim.name, dim.example) for dim in dims}
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(dims):
            what = f"{given!r:.60} has {len(given)} sizes, there are {len(dims)} dynamic dims"
            raise OptionError(what, where=WHERE, remedy=f"give sizes of {', '.join(names)}, in this order")
        named = dict(zip(names, given, strict=True))
    else:
        raise OptionError(f"cannot read {given!r:.60} as sizes", where=WHERE, remedy=REMEDY)
    for dim in dims:
        size = named[dim.name]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"{dim.name} cannot be {size!r:.30}", where=WHERE, remedy="give a number of elements, at least 1")
        dim.check(size)
        yield dim.name, size


def largest_sizes(dims: Sequence[DynamicDim], sampled: Sequence[WeightedSizes], ranks: int, guards: Sequence[Guard] = ()) -> dict[str, int]:
    """The largest sizes to plan for, by name: each dim's ``most``; without one, the largest of its example and its ``sampled`` sizes.

    If shards must be even, ``most`` is rounded up to a multiple of ``ranks``, the mesh's number of ranks. If ``guards`` do not hold for
    these sizes, the dims grow in turn from the example's sizes as far as the guards allow, until none can grow alone. Calls with larger
    sizes are traced and planned separately.
    """
    most = {dim.name: _upper_size(dim, sampled, ranks) for dim in dims}
    if first_broken(guards, most) is None:
        return most
    found = {dim.name: dim.example for dim in dims}
    for _ in range(MAX_ROUNDS):
        before = dict(found)
        for dim in dims:
            found[dim.name] = _grown(found, dim.name, most[dim.name], 1 if dim.uneven else ranks, guards)
        if found == before:
            break
    return found


def _upper_size(dim: DynamicDim, sampled: Sequence[WeightedSizes], ranks: int) -> int:
    largest = max(dim.example, *(dict(one.sizes)[dim.name] for one in sampled), 0)
    if dim.most is None or dim.most <= largest:
        return largest
    return dim.most if dim.uneven else -(-dim.most // ranks) * ranks


MAX_ROUNDS = 100
"""Maximum number of rounds in which dims that bound each other grow in turn."""
TRIED_LARGEST = 4
"""Number of the largest sizes tried one by one before bisection: the size may have to be a multiple of something."""


def _grown(sizes: Mapping[str, int], name: str, largest: int, unit: int, guards: Sequence[Guard]) -> int:
    """The largest size of the dim ``name`` for which the guards hold, the other dims being ``sizes``: ``largest`` itself or a smaller
    multiple of ``unit``. At least the dim's size in ``sizes``, for which the guards hold."""

    def holds(size: int) -> bool:
        return first_broken(guards, {**sizes, name: size}) is None

    least = sizes[name]
    low, high = least // unit, largest // unit
    near = next((size for size in (largest, *(unit * (high - k) for k in range(TRIED_LARGEST))) if size <= least or holds(size)), None)
    if near is not None:
        return max(near, least)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(unit * middle) else (low, middle)
    return max(unit * low, least)
