"""Values of all ranks in one process, and functions that run once for each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import changes_of
from fxshard.errors import LayoutError, OptionError, RunError, a_kind
from fxshard.layout.layouts import Layout, check_layout, local_shape
from fxshard.mesh.mesh import Mesh
from fxshard.runtime.simulate.shards import gather, scatter


@dataclass(frozen=True, repr=False)
class RankValues:
    """One value per rank, in rank order; indexed by rank, ``values[3]``, or by coordinate, ``values[1, 0]``."""

    mesh: Mesh
    values: tuple[Any, ...]

    def __getitem__(self, rank: int | tuple[int, ...]) -> Any:
        number = self.mesh.rank(rank) if isinstance(rank, tuple) and rank in set(self.mesh.coordinates()) else rank
        if not isinstance(number, int) or not 0 <= number < self.mesh.size:
            remedy = f"give a rank below {self.mesh.size}, or one index per axis"
            raise OptionError(f"mesh {self.mesh} has no rank {rank!r}", remedy=remedy)
        return self.values[number]

    def __repr__(self) -> str:
        return f"RankValues({self.mesh}: {list(self.values)})"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def whole(self, layout: Layout | str, shape: Sequence[int]) -> torch.Tensor:
        """The global tensor of ``shape`` whose shards in ``layout`` these values are.

        Raises LayoutError for an invalid layout, RunError for shards of other shapes or replicas that differ.
        """
        shape = tuple(shape)
        layout = _layout(layout, len(shape), self.mesh)
        return gather(dict(zip(self.mesh.coordinates(), _shards(self, layout, shape), strict=True)), layout, shape, self.mesh)


def shard(value: torch.Tensor, layout: Layout | str, mesh: Mesh) -> RankValues:
    """The shards of the global tensor ``value`` in ``layout`` (``"S(0)R"``) on each rank, cut as by ``torch.chunk``: uneven or empty.

    Replicas share memory. Raises LayoutError for an invalid layout.
    """
    if not isinstance(value, torch.Tensor):
        raise OptionError(f"shard was given {a_kind(value)}", remedy="give a tensor")
    layout = _layout(layout, value.dim(), mesh)
    return RankValues(mesh, tuple(scatter(value, layout, mesh, c) for c in mesh.coordinates()))


def coordinates(mesh: Mesh) -> RankValues:
    """The coordinate of each rank, one index per axis: for functions that need to know where they run."""
    return RankValues(mesh, tuple(mesh.coordinates()))


def per_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``function`` to accept ``RankValues``: runs it once per rank on that rank's values; leaves of its result become RankValues.

    Without RankValues among its arguments it runs once, unchanged, so that the same code serves on a real rank. It must not have side
    effects or communicate. Usable as a decorator.

    Raises RunError when it fails on a rank (the rank is named), writes into its arguments, returns structures that differ, or gets values
    of two meshes.
    """
    if not callable(function):
        raise OptionError(f"per_rank was given {a_kind(function)}", remedy="give a function")
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_ranked)
        mesh = _mesh(leaves)
        if mesh is None:
            return function(*args, **kwargs)
        results = [_run_on_rank(function, name, mesh, rank, leaves, spec) for rank in range(mesh.size)]
        return _stack_results(name, mesh, results)

    return run


def _run_on_rank(function: Callable[..., Any], name: str, mesh: Mesh, rank: int, leaves: Sequence[Any], spec: Any) -> Any:
    own = [leaf[rank] if _is_ranked(leaf) else leaf for leaf in leaves]
    before = [changes_of(x) if isinstance(x, torch.Tensor) else 0 for x in own]
    args, kwargs = pytree.tree_unflatten(own, spec)
    where = f"rank {rank} of mesh {mesh}, at {mesh.coordinate(rank)}"
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        what = f"{name} raised {type(error).__name__} on rank {rank}: {error}"
        raise RunError(what, where=where, remedy="see the cause above; it may be a shard that is shorter than others, or empty") from error
    if any(isinstance(x, torch.Tensor) and changes_of(x) != b for x, b in zip(own, before, strict=True)):
        raise RunError(f"{name} wrote into an argument on rank {rank}", where=where, remedy="return new tensors: replicas share memory")
    return result


def _stack_results(name: str, mesh: Mesh, results: Sequence[Any]) -> Any:
    """The ranks' results as one structure, each leaf a RankValues."""
    flat = [pytree.tree_flatten(r) for r in results]
    for rank, (_, spec) in enumerate(flat):
        if spec != flat[0][1]:
            mine, other = (" ".join(str(s).split()) for s in (spec, flat[0][1]))
            what = f"{name} returned {mine} on rank {rank}, {other} on rank 0"
            raise RunError(what, remedy="return the same structure on each rank")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([RankValues(mesh, tuple(column)) for column in columns], flat[0][1])


def _is_ranked(value: Any) -> bool:
    return isinstance(value, RankValues)


def _mesh(leaves: Sequence[Any]) -> Mesh | None:
    meshes = [leaf.mesh for leaf in leaves if _is_ranked(leaf)]
    for mesh in meshes:
        if (mesh.axis_names, mesh.shape) != (meshes[0].axis_names, meshes[0].shape):
            raise RunError(f"values of mesh {meshes[0]} and of mesh {mesh} in one call", remedy="shard all of them over one mesh")
    return meshes[0] if meshes else None


def _layout(layout: Layout | str, ndim: int, mesh: Mesh) -> Layout:
    if isinstance(layout, str):
        layout = Layout.parse(layout)
    if not isinstance(layout, tuple):
        raise LayoutError(f"the layout is {a_kind(layout)}", remedy="write it like 'S(0)R', one placement per axis")
    return check_layout(Layout(layout), ndim, mesh.ndim, "the value")


def _shards(values: RankValues, layout: Layout, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    for rank, (value, coordinate) in enumerate(zip(values, values.mesh.coordinates(), strict=True)):
        want = local_shape(shape, layout, values.mesh.shape, coordinate)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != want:
            have = tuple(value.shape) if isinstance(value, torch.Tensor) else a_kind(value)
            raise RunError(f"rank {rank} holds {have}, in layout {layout} of {shape} it would be {want}", remedy="give its own layout")
    return values.values
