"""The sizes that Dynamo left open (symbolic) in a graph: each symbol, or expression of symbols, is one size, wherever it occurs.

Dynamo passes the symbols of tensor sizes as numbers among a graph's inputs. Here each is read from a tensor dim of that size instead.
Other numbers (an ``int`` argument, a ``float``) belong to the call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.sizes.symbols import bounds_of, expression
from fxshard.shapes import DynamicDim


@dataclass(frozen=True)
class OpenSize:
    """A size that may change from call to call. ``places``: (placeholder, dim) of the tensors that have it; ``numbers``: placeholders
    whose value is this size; ``least``, ``most``: the range that Dynamo guards, both included."""

    places: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    least: int
    most: int | None


def open_sizes(placeholders: Sequence[fx.Node]) -> tuple[OpenSize, ...]:
    """The open sizes of a graph that Dynamo captured, in the order of its tensors' dims.

    An expression of symbols counts if each of its symbols is itself the size of a dim.
    """
    places: dict[Any, list[tuple[int, int]]] = {}
    numbers: dict[Any, list[int]] = {}
    sizes: dict[Any, torch.SymInt] = {}
    for i, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            numbers.setdefault(expression(value), []).append(i)
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and expression(size).free_symbols:
                sizes[expression(size)] = size
                places.setdefault(expression(size), []).append((i, dim))
    known = [expr for expr in places if all(symbol in places for symbol in expr.free_symbols)]
    return tuple(OpenSize(tuple(places[e]), tuple(numbers.get(e, ())), *bounds_of(sizes[e])) for e in known)


def sizes_of_stacks(sizes: Sequence[OpenSize], stacks: Collection[int]) -> tuple[OpenSize, ...]:
    """``sizes`` where each of the placeholders ``stacks`` has a further dim before the others."""
    return tuple(replace(one, places=tuple((i, dim + (i in stacks)) for i, dim in one.places)) for one in sizes)


def dims_of(sizes: Sequence[OpenSize], names: Sequence[str], args: Sequence[Any]) -> tuple[DynamicDim, ...]:
    """The dynamic dims of a call with ``args``; ``names``: those of all placeholders.

    The user did not ask for these dims, so one that cannot change becomes static without an error.
    """
    found: dict[str, DynamicDim] = {}
    for one in sizes:
        at, dim = one.places[0]
        plain = f"{re.sub(r'[^0-9A-Za-z]+', '_', names[at]).strip('_')}_{dim}"
        name = next(n for k in range(len(sizes)) if (n := plain if not k else f"{plain}_{k}") not in found)
        places = tuple((names[i], d) for i, d in one.places)
        found[name] = DynamicDim(name, places, int(args[at].shape[dim]), max(one.least, 1), one.most, required=False)
    return tuple(found.values())
