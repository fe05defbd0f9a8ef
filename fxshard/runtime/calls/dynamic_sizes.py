"""Programs that serve calls of several sizes: which dims become dynamic, which program serves a call, and why another refuses it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import OptionError, RuleError, StaticDimError, TraceError
from fxshard.graph.objects import COUNTER_LIMIT, is_length, lengths_after, outputs_in_objects
from fxshard.graph.planning_graph import PlanningGraph, operands
from fxshard.passes.annotation.annotate import illegal_node_at
from fxshard.passes.trace.named_layouts import LocalInputsError
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.launch import announce, mesh_ranks, objection
from fxshard.shapes import DynamicDim, first_broken

UNEVEN_SIZES = "%s is not a multiple of its number of shards: the next program allows shards of unequal lengths and serves every size"
REFUSED_BEFORE_COMPILING = "the program does not serve this call; it is kept for other calls, and compiled when the first of them comes: %s"
REFUSED_AFTER_COMPILING = "the program does not serve this call; it is kept for other calls, and another is made for this one: %s"

Shapes = tuple[tuple[int, ...] | None, ...]
"""The shapes of the leaves of a call's arguments; None for a leaf that is not a tensor."""


class CachedProgram(Protocol):
    """A program, its graph, and the ``shapes`` of the call that it was made for."""

    @property
    def runner(self) -> Runner: ...
    @property
    def graph(self) -> PlanningGraph: ...
    @property
    def shapes(self) -> Shapes: ...


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)


def size_free_key(key: Any) -> Any:
    """A call's key (see ``ShardedForward``) with each shape replaced by its rank: equal for calls that differ in sizes only."""
    *others, leaves = key
    return *others, tuple((len(leaf[0]), *leaf[1:]) if isinstance(leaf[0], torch.Size) else leaf for leaf in leaves)


def refusal(runner: Runner, shapes: Shapes, leaves: Sequence[Any]) -> str | None:
    """Why the program of ``runner``, made for ``shapes``, cannot serve a call of ``leaves``; None if it can.

    The call may differ from the one that the program was made for in sizes only.
    """
    return _refusal_before_compiling(runner, shapes, leaves) or _refusal_of_compiler(runner, leaves)


def _refusal_before_compiling(runner: Runner, shapes: Shapes, leaves: Sequence[Any]) -> str | None:
    """The reason that the lowered program alone gives, without its compiled code."""
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
    return program.refuses(sizes)


def _refusal_of_compiler(runner: Runner, leaves: Sequence[Any]) -> str | None:
    guard = first_broken(runner.compiled.guards, runner.sizes_of(leaves)) if runner.program.sizes else None
    return None if guard is None else f"the compiler takes for granted that {guard}"


def agreed_refusal(found: CachedProgram, leaves: Sequence[Any], device_mesh: DeviceMesh, timeout: float = TIMEOUT) -> str | None:
    """As ``refusal``, but the same on all ranks, whose compiled code may have different guards. Every rank calls this.

    Compiles a program that is not compiled yet, unless the lowered program, the same on all ranks, already refuses the call.
    """
    runner, program = found.runner, found.runner.program
    reason = _refusal_before_compiling(runner, found.shapes, leaves)
    if reason is None and any(one.uneven for one in program.sizes):
        node = illegal_node_at(found.graph, program.plan, runner.sizes_of(leaves))
        reason = None if node is None else f"the plan's layouts of {node} are not legal at these sizes"
    if reason is not None:
        return reason
    compiled = runner.compiled
    compiled.compile()
    mine = _refusal_of_compiler(runner, leaves)
    return mine if compiled.same_guards_on_ranks else objection(mine, ranks=mesh_ranks(device_mesh), timeout=timeout)


def refusal_message(found: CachedProgram, reason: str) -> tuple[int, str, str]:
    """(log level, text, its argument) for a program that does not serve the call that it was made for; ``reason``: why."""
    if found.runner.compiled.is_compiled:
        return logging.WARNING, REFUSED_AFTER_COMPILING, reason
    return logging.INFO, REFUSED_BEFORE_COMPILING, reason


def replan_message(retry: bool, silent: bool = False) -> tuple[int, str]:
    """(log level, message) for planning another program: a WARNING, but INFO if ``silent``.

    A further program for the same call (``retry``) is INFO too, so that there is one warning per call.
    """
    if retry:
        return logging.INFO, "planning once more for %s: %s"
    return logging.INFO if silent else logging.WARNING, "planning again for %s: %s"


def uneven_sizes(runner: Runner, leaves: Sequence[Any]) -> set[str]:
    """The dynamic sizes of a call that are not multiples of their unit in the program of ``runner``."""
    sizes = runner.sizes_of(leaves) if runner.sizes else {}
    return {one.name for one in runner.program.sizes if sizes[one.name] % one.unit}


def trace_with_static_fallback(
    trace: Callable[[tuple[DynamicDim, ...]], PlanningGraph],
    dims: tuple[DynamicDim, ...],
    device_mesh: DeviceMesh,
    moved: Collection[str] | None = None,
) -> PlanningGraph:
    """The graph that ``trace`` returns for ``dims``.

    An automatic dynamic dim that the model does not allow to change becomes static. This is logged as a WARNING if the dim's name is among
    ``moved`` (default: all), else as INFO. If the user asked for the dim, or no dim is dynamic, the error of ``trace`` is raised.
    """
    while True:
        try:
            return trace(dims)
        except LocalInputsError:  # not about sizes
            raise
        except (TraceError, RuleError) as error:
            named = error.dim if isinstance(error, StaticDimError) else None
            if not dims or any(dim.required and named in (None, dim.name) for dim in dims):
                raise
            changed = moved is None or (bool(moved) if named is None else named in moved)
            announce(device_mesh, logging.WARNING if changed else logging.INFO, "sizes stay static: %s", error.what)
            dims = tuple(dim for dim in dims if named is not None and dim.name != named)


def dynamic_dims_of_call(
    named: Mapping[str, Any],
    asked: Sequence[DynamicDim],
    seen: Sequence[Shapes],
    made: Sequence[tuple[Runner, Shapes]],
    *,
    everything: bool = False,
) -> tuple[tuple[DynamicDim, ...], tuple[str, ...]]:
    """(the dynamic dims of the next program for the leaves ``named``, the names of those whose size is odd, for the first time).

    ``seen``: shapes of similar calls. ``made``: programs that would serve the call but for its sizes, and their shapes. Other
    arguments as in ``varying_dims``. If a program with uneven shards does not serve the call either, some other assumption of the model
    fails, and the next program allows uneven shards too. If a program made for exactly these shapes refuses them, first the dims of
    size 1 become static, because kernels specialise on them, then all dims. If a tensor is empty, no dim is dynamic.
    """
    leaves = list(named.values())
    tried = {one.name for runner, _ in made for one in runner.program.sizes if one.uneven}
    uneven = {name for runner, _ in made for name in uneven_sizes(runner, leaves)}
    own = [{one.name for one in runner.program.sizes} for runner, shapes in made if runner.program.sizes and shapes == shapes_of(leaves)]
    empty = any(0 in leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_length(leaf))
    if empty:
        return (), ()
    dims = varying_dims(named, asked, seen, everything=everything)
    if own and not uneven - tried:
        ones = {dim.name for dim in dims if dim.example == 1}
        if not ones or any(ones.isdisjoint(names) for names in own):
            return (), ()
        dims = tuple(dim for dim in dims if dim.name not in ones)
    found = tuple(replace(dim, uneven=bool(uneven | tried), required=dim.required and not made) for dim in dims)
    return found, tuple(sorted(uneven - tried))


def fallback_dims(dims: Sequence[DynamicDim]) -> tuple[DynamicDim, ...]:
    """The dims to try next if no program for ``dims`` is possible: the same with uneven shards, then none."""
    if any(dim.uneven for dim in dims):
        return ()
    return tuple(replace(dim, uneven=True) for dim in dims)


def varying_dims(
    named: Mapping[str, Any], asked: Sequence[DynamicDim], seen: Sequence[Shapes], *, everything: bool = False
) -> tuple[DynamicDim, ...]:
    """The dynamic dims of a call of the leaves ``named``: those ``asked`` for, and those that had another size in ``seen``.

    Dims whose sizes were equal to each other in every call become one dynamic dim: one of those ``asked`` for, if that changed in the same
    way, else a new one. ``everything``: whether to make every dim dynamic whose size is not 1.
    """
    index = {path: i for i, path in enumerate(named)}

    def history(place: tuple[str, int]) -> tuple[int, ...]:
        path, dim = place
        return named[path].shape[dim], *_sizes_before(index[path], dim, seen)

    asked = [part for one in asked for part in (_parts(one, history) if seen else [one])]
    taken = {place for one in asked for place in one.places}
    tensors = {path: leaf for path, leaf in named.items() if isinstance(leaf, torch.Tensor)}
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for place in ((path, dim) for path, leaf in tensors.items() for dim in range(leaf.dim())):
        size, *before = sizes = history(place)
        moved = any(one != size for one in before)
        like = [i for i, one in enumerate(asked) if moved and history(one.places[0]) == sizes]
        if place in taken or not (moved or (everything and size > 1)):
            continue
        if like:
            at = next((i for i in like if any(dim == place[1] for _, dim in asked[i].places)), like[0])
            asked[at] = replace(asked[at], places=(*asked[at].places, place))
        else:
            groups.setdefault(sizes, []).append(place)
    found = [*asked, *(_automatic_dim(places, sizes[0]) for sizes, places in groups.items())]
    names = [dim.name for dim in found]
    if len(set(names)) < len(names):
        raise OptionError(f"two dynamic dims are called {next(n for n in names if names.count(n) > 1)!r}", remedy="give them other names")
    return tuple(found)


def _sizes_before(leaf: int, dim: int, seen: Sequence[Shapes]) -> list[int]:
    """The sizes of a dim of a leaf that is a tensor, as in the current call, in each of the similar calls ``seen``."""
    return [shape[dim] for shapes in seen if (shape := shapes[leaf]) is not None]


def moved_names(dims: Sequence[DynamicDim], named: Mapping[str, Any], seen: Sequence[Shapes]) -> set[str]:
    """The names of those ``dims`` of a call of the leaves ``named`` that had another size in ``seen``, shapes of similar calls."""
    index = {path: i for i, path in enumerate(named)}
    return {
        one.name for one in dims for path, dim in one.places if any(size != one.example for size in _sizes_before(index[path], dim, seen))
    }


def _parts(dim: DynamicDim, history: Callable[[tuple[str, int]], tuple[int, ...]]) -> list[DynamicDim]:
    """``dim`` split into groups of places whose sizes were equal in every call. Only dims that were marked, not named, can need a split."""
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for place in dim.places:
        groups.setdefault(history(place), []).append(place)
    first, *others = groups.values()
    parts = [replace(dim, places=tuple(first))]
    return parts + [replace(dim, name=_automatic_dim(places, dim.example).name, places=tuple(places)) for places in others]


def _automatic_dim(places: Sequence[tuple[str, int]], size: int) -> DynamicDim:
    """A dynamic dim that the user did not ask for, named after its first place."""
    path, dim = places[0]
    return DynamicDim(f"{re.sub(r'[^0-9A-Za-z]+', '_', path).strip('_')}_{dim}", tuple(places), size, required=False)


def dims_changed_by_call(graph: PlanningGraph, named: Mapping[str, Any], known: Sequence[DynamicDim]) -> tuple[DynamicDim, ...]:
    """The dims, besides ``known``, that the call of the leaves ``named`` changes itself, in the objects that it is given, such as a cache.

    Numbers that the call changes there count as dims too. The next call of this kind has other sizes. Dims of other arguments that have
    the new size change along, such as those of a mask over the cache and the new token. Their dim 0 does not if dim 0 of the growing tensor
    has that size and keeps it: then it is the batch.
    """
    taken = {place for dim in known for place in dim.places}
    after = {end.name: value.meta["val"] for end, value in zip(graph.outputs, operands(graph.module.graph.output_node()), strict=True)}
    left = {path: after[name].shape for name, path in outputs_in_objects(graph.out_spec).items() if isinstance(after[name], torch.Tensor)}
    numbers = zip(named, lengths_after(graph.out_spec, len(named)), strict=True)
    left |= {path: (number, 0) for path, number in numbers if number is not None and number < COUNTER_LIMIT}
    leaves = {path: x.shape for path, x in named.items() if isinstance(x, torch.Tensor) and (x.numel() or (is_length(x) and len(x)))}
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for path, shape in leaves.items():
        for dim, (size, new) in enumerate(zip(shape, left.get(path, ()), strict=False)):
            if size != new and len(shape) == len(left[path]) and (path, dim) not in taken:
                groups.setdefault((size, new), []).append((path, dim))
    counts = {path for path, leaf in named.items() if is_length(leaf)}
    for size, grown in {new: {path for path, _ in places} for (_, new), places in groups.items()}.items():
        others = [path for path in leaves if path not in left and (grown - counts or not named[path].is_floating_point())]  # such as a mask
        batch = any(leaves[path][:1] == left[path][:1] == (size,) for path in grown - counts)
        along = [(path, d) for path in others for d, n in enumerate(leaves[path]) if n == size and not (batch and d == 0)]
        if along := [place for place in along if place not in taken]:
            groups[(size,)] = along
    return tuple(_automatic_dim(places, sizes[0]) for sizes, places in groups.items())
