"""Programs that serve calls of several sizes: which do, which dims are dynamic by themselves, and why a program refuses a call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxshard.errors import OptionError
from fxshard.runtime.runner import Runner
from fxshard.shapes import DynamicDim, broken

Shapes = tuple[tuple[int, ...] | None, ...]
"""Of the leaves of a call's arguments; None for those that are no tensors."""


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)


def alike_key(key: Any) -> Any:
    """What a call's key (``ShardedForward``) has in common with those of calls whose sizes alone differ: of a shape its length."""
    *others, leaves = key
    return *others, tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf[0], torch.Size) else leaf for leaf in leaves)


def refusal(runner: Runner, shapes: Shapes, leaves: Sequence[Any]) -> str | None:
    """Why the program of ``runner``, made for ``shapes``, cannot serve a call of ``leaves``; None where it can.

    The leaves are those of a call like the one that it was made for, but for sizes.
    """
    program = runner.program
    places = {(runner.leaf_of[path], dim): one for one in program.sizes for path, dim in one.places}
    sizes: dict[str, int] = {}
    for i, (have, want) in enumerate(zip(shapes_of(leaves), shapes, strict=True)):
        for dim, (size, made) in enumerate(zip(have or (), want or (), strict=True)):
            one = places.get((i, dim))
            name = next((n for n, place in runner.leaf_of.items() if place == i), f"argument {i}")
            if one is None and size != made:
                return f"dim {dim} of {name} is {size}, the program was made for {made}"
            if one is not None and sizes.setdefault(one.name, size) != size:
                return f"dim {dim} of {name} is {size}, another dim called {one.name} is {sizes[one.name]}"
    for one in program.sizes:
        if sizes[one.name] < one.least or (one.most is not None and sizes[one.name] > one.most):
            return f"{one.name} is {sizes[one.name]}, out of its range"
    reason = program.refuses(sizes)
    if reason is not None:
        return reason
    guard = broken(runner.compiled.guards, sizes)
    return None if guard is None else f"the compiler takes for granted that {guard}"


def uneven_sizes(runner: Runner, leaves: Sequence[Any]) -> set[str]:
    """The sizes of a call that are no multiples of their unit in a program that serves calls like it."""
    sizes = runner.sizes_of(leaves) if runner.sizes else {}
    return {one.name for one in runner.program.sizes if sizes[one.name] % one.unit}


RANKS = 16
"""Up to so many ranks a program for shards of unequal lengths is made, which has a graph for each."""


def dims_of_call(
    named: Mapping[str, Any],
    asked: Sequence[DynamicDim],
    seen: Sequence[Shapes],
    made: Sequence[tuple[Runner, Shapes]],
    ranks: int,
    *,
    everything: bool = False,
) -> tuple[tuple[DynamicDim, ...], tuple[str, ...]]:
    """(the dims that are dynamic in a program for the leaves ``named``, those of them of which no program so far cuts the size evenly).

    ``seen``: shapes of calls like this one. ``made``: programs that would serve it but for its sizes, and their shapes. ``ranks`` of the
    mesh. Other arguments as ``changed_dims``. Where one for shards of unequal lengths does not serve it either, the model takes something
    else for granted: the next one is for such lengths too. None is dynamic where a program was made for this very call and does not
    serve it, for tensors without elements, and on a mesh of too many ranks for a graph of each.
    """
    leaves = list(named.values())
    tried = {one.name for runner, _ in made for one in runner.program.sizes if one.uneven}
    uneven = {name for runner, _ in made for name in uneven_sizes(runner, leaves)}
    own = any(runner.program.sizes and shapes == shapes_of(leaves) for runner, shapes in made)
    if any(0 in (shape or ()) for shape in shapes_of(leaves)) or (own and not uneven) or (own and tried) or (uneven and ranks > RANKS):
        return (), ()
    dims = changed_dims(named, asked, seen, everything=everything)
    found = tuple(replace(dim, uneven=dim.name in uneven | tried, asked=dim.asked and not made) for dim in dims)
    return found, tuple(sorted(uneven - tried))


def less_even(dims: Sequence[DynamicDim], ranks: int) -> tuple[DynamicDim, ...]:
    """What to try where no program for ``dims`` can be: with shards of unequal lengths, then with none of them dynamic."""
    if ranks > RANKS or any(dim.uneven for dim in dims):
        return ()
    return tuple(replace(dim, uneven=True) for dim in dims)


def changed_dims(
    named: Mapping[str, Any], asked: Sequence[DynamicDim], seen: Sequence[Shapes], *, everything: bool = False
) -> tuple[DynamicDim, ...]:
    """The dims that are dynamic in a call of the leaves ``named``: those ``asked`` for, and those that had another size in ``seen``.

    Of the latter those that have always had one size are one. ``everything``: all dims of tensors that have more than one element.
    """
    taken = {place for dim in asked for place in dim.places}
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for i, (path, leaf) in enumerate(named.items()):
        for dim, size in enumerate(leaf.shape if isinstance(leaf, torch.Tensor) else ()):
            before = tuple(shapes[i][dim] for shapes in seen)  # type: ignore[index]
            moved = any(one != size for one in before) or (everything and size > 1)
            if moved and (path, dim) not in taken:
                groups.setdefault((size, *before), []).append((path, dim))
    found = list(asked)
    for sizes, places in groups.items():
        path, dim = places[0]
        name = f"{re.sub(r'[^0-9A-Za-z]+', '_', path).strip('_')}_{dim}"
        found.append(DynamicDim(name, tuple(places), sizes[0], asked=False))
    names = [dim.name for dim in found]
    if len(set(names)) < len(names):
        raise OptionError(f"two dynamic dims are called {next(n for n in names if names.count(n) > 1)!r}", remedy="give them other names")
    return tuple(found)
