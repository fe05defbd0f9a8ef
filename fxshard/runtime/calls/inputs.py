"""Conversion between the user's tensors and a rank's local ones: a plain tensor is a global value, a DTensor keeps its layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import DENSE
from fxshard.errors import OptionError, PlanError, RunError, a_kind
from fxshard.graph.objects import Counted, is_length, leaves_in_objects, length_of, open_call, outputs_in_objects
from fxshard.layout.layouts import Layout, chunk_lengths, same_layout
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.options import check_device_mesh
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.ranks.watchdog import watching
from fxshard.runtime.simulate.shards import scatter
from fxshard.runtime.simulate.values import check_has_data
from fxshard.shapes import DynamicDim
from fxshard.shapes.arguments import path_name


def local_batch(x: torch.Tensor, device_mesh: DeviceMesh, axis: str = "dp", size: int | None = None) -> DTensor:
    """This rank's own batch ``x`` [n, ...] as a DTensor: dim 0 sharded over ``axis``, replicated over the other axes.

    The ranks of ``axis`` exchange the lengths of their batches (one small collective), unless ``size``, the length of the whole
    batch, is given. The lengths must be those of the chunks of ``torch.chunk``. Raises LayoutError for an unknown axis, RunError for
    other lengths.
    """
    check_device_mesh(device_mesh)
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor):
        raise OptionError(f"the batch is {a_kind(x)}", remedy="give this rank's own rows as a plain tensor, one tensor per call")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise OptionError(f"the size of the whole batch is {size!r}", remedy="give a number of rows, or leave size out")
    mesh = as_mesh(device_mesh)
    index = mesh.axis(axis)
    if x.dim() == 0:
        raise RunError("a scalar has no batch dim", remedy="give local_batch a tensor whose dim 0 is the batch")
    ranks, mine = mesh.shape[index], device_mesh.get_local_rank(index)
    lengths = _gather_lengths(x, device_mesh, index) if size is None else list(chunk_lengths(size, ranks))
    total = sum(lengths)
    if lengths != list(chunk_lengths(total, ranks)) or lengths[mine] != x.shape[0]:
        held = lengths if size is None else f"{x.shape[0]} on this rank"
        raise RunError(
            f"a batch of {total} over {axis}={ranks} is split into {list(chunk_lengths(total, ranks))}, but the ranks hold {held}",
            remedy="give each rank its part of torch.chunk(batch, ranks): all but the last ones hold ceil(size / ranks)",
        )
    placements = [Shard(0) if i == index else Replicate() for i in range(mesh.ndim)]
    return as_dtensor(x, device_mesh, Layout(placements), (total, *x.shape[1:]))


def _gather_lengths(x: torch.Tensor, device_mesh: DeviceMesh, axis: int) -> list[int]:
    group = device_mesh.get_group(axis)
    mine = torch.tensor([x.shape[0]], device=x.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with watching("tell each other the lengths of their batches", group):
        dist.all_gather(everyone, mine, group=group)
    return [int(n) for n in everyone]


def as_dtensor(local: torch.Tensor, device_mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """``local`` as the shard of a tensor of global ``shape``; differentiable."""
    shape = torch.Size(shape)
    return DTensor.from_local(local, device_mesh, tuple(layout), run_check=False, shape=shape, stride=_strides(shape))


@functools.lru_cache(1024)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


_LEAF_TYPES = frozenset({torch.Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None)})


class Leaves(list[Any]):
    """The leaves of a call, and the objects among its arguments (see ``fxshard.graph.objects``), which the call may change."""

    objects: Sequence[Any] = ()


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], counted: Counted = frozenset()) -> tuple[Sequence[Any], pytree.TreeSpec]:
    """(leaves, structure) of a call's ``(args, kwargs)``; equal calls without containers share one structure object.

    ``counted``: the numbers that calls change, which are leaves too (see ``fxshard.graph.objects``).
    """
    leaves = (*args, *kwargs.values()) if kwargs else args
    if _LEAF_TYPES.issuperset(map(type, leaves)):
        return leaves, _flat_structure(len(args), tuple(kwargs))
    *call, objects = open_call(args, kwargs, counted)
    flat, spec = pytree.tree_flatten(tuple(call))
    found = Leaves(flat)
    found.objects = objects
    return found, spec


@functools.lru_cache(1024)
def _flat_structure(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    return pytree.tree_flatten(((None,) * count, dict.fromkeys(names)))[1]


def leaf_key(leaf: Any) -> Any:
    """The part of a program's key that depends on one leaf: shape, dtype and so on of a tensor, the type and value of anything else."""
    if isinstance(leaf, DTensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad, leaf.placements
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return type(leaf), leaf if leaf.__hash__ is not None else repr(leaf)


def leaf_names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """``args[0]``, ``kwargs['mask']``: the name of each leaf, in the order of flattening."""
    return [path_name(path) for path, _ in pytree.tree_flatten_with_path(open_call(args, kwargs)[:2])[0]]


def has_layout(value: DTensor, layout: Layout) -> bool:
    """Whether a DTensor is in ``layout``; on axes of one rank, all placements mean the same."""
    return same_layout(Layout(value.placements), layout, tuple(value.device_mesh.shape))


def layout_of(value: torch.Tensor, mesh: Mesh) -> Layout:
    """The layout of a user's tensor on the mesh: a plain tensor is replicated."""
    return Layout(value.placements) if isinstance(value, DTensor) else Layout.replicated(mesh.ndim)


Read = Callable[[torch.Tensor], torch.Tensor]


def reader(layout: Layout, bound: BoundProgram, name: str) -> Read:
    """A function from a user's tensor to the tensor that the program reads: a DTensor unchanged, this rank's shard of a plain one.

    A shard of a plain tensor that needs a gradient is a DTensor: the program returns the gradient of the whole tensor.
    The function raises PlanError for a DTensor in another layout than the planned one, RunError for a tensor without memory.
    """
    placements, device, whole = tuple(layout), bound.device, layout.is_replicated

    def read(value: torch.Tensor) -> torch.Tensor:
        if whole and type(value) in DENSE and value.device == device:
            return value
        check_has_data("input", name, value)
        if not isinstance(value, DTensor):
            moved = value.to(device)
            if whole:
                return moved
            if moved.requires_grad and torch.is_grad_enabled():
                return _Distributed.apply(moved, layout, bound)
            return scatter(moved.detach(), layout, bound.program.mesh, bound.coordinate)
        if value.placements != placements and not has_layout(value, layout):
            raise PlanError(
                f"{name} is a DTensor in {Layout(value.placements)}, the plan reads it in {layout}",
                remedy=f"plan with input_layouts={{{name!r}: '{Layout(value.placements)}'}}, or redistribute it before the call",
            )
        return value

    return read


class _Distributed(torch.autograd.Function):
    """A plain tensor, equal on all ranks, as a DTensor, whose gradient the program returns whole, if there is one."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, layout: Layout, bound: BoundProgram) -> DTensor:
        ctx.set_materialize_grads(False)
        return as_dtensor(scatter(value.detach(), layout, bound.program.mesh, bound.coordinate), bound.device_mesh, layout, value.shape)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if gradient is None else gradient.to_local(), None, None


def global_result(local: torch.Tensor, layout: Layout, shape: tuple[int, ...], bound: BoundProgram, distributed: bool) -> torch.Tensor:
    """A program's result for the user: a DTensor in its layout if ``distributed``, else the plain global tensor.

    Raises PlanError for a plain result that is not replicated: the plan has no collective to gather it.
    """
    if distributed:
        return as_dtensor(local, bound.device_mesh, layout, shape)
    if not layout.is_replicated:
        what = f"a plain result of shape {shape} is in {layout} and would have to be gathered"
        raise PlanError(what, remedy=f"plan with output_layouts={str(Layout.replicated(len(layout)))!r}, or pass DTensors")
    return local


def check_plain_results(
    program: ShardedProgram,
    leaves: Mapping[str, Any],
    distributed: Sequence[bool] | None = None,
    requested_outputs: Collection[str] = (),
) -> None:
    """Raises PlanError if a plain result is not replicated: the plan has no collective to gather it.

    Plain results are plain outputs, gradients of plain arguments, and new values of plain arguments and buffers. ``leaves``: the
    arguments by name. ``distributed``: for each output whether it is a DTensor; by default all are if an argument is one.
    ``requested_outputs``: names of outputs whose layout the user requested; these, and outputs in objects, are DTensors unless
    replicated.
    """
    shared = {name for name, x in leaves.items() if isinstance(x, DTensor)}
    kinds = {end.name: end.kind for end in program.inputs}
    returned = [end.name for end in program.outputs if end.kind == "output"]
    if distributed is not None:
        shared |= {name for name, one in zip(returned, distributed, strict=True) if one}
    elif shared - {name for i, name in enumerate(leaves) if i in leaves_in_objects(program.in_spec)}:
        shared |= set(returned)
    shared |= {*requested_outputs, *outputs_in_objects(program.out_spec)}
    for end, layout in zip(program.outputs, program.output_layouts, strict=True):
        whole = str(Layout.replicated(len(layout)))
        if layout.is_replicated or end.name in shared or kinds.get(end.name) == "parameter":
            continue
        if end.kind == "output":
            remedy = f"plan with output_layouts={whole!r}, or pass DTensors (fxshard.local_batch): then outputs are DTensors"
            raise PlanError(f"{end.name} is planned in {layout}, but returned as a plain tensor, so it must be replicated", remedy=remedy)
        what = "its gradient" if end.kind == "gradient" else "its new value"
        option = "input_layouts" if kinds[end.name] == "input" else "pins"
        other = "" if option == "pins" else ", pass a DTensor, or leave the plan to parallelize or the backend"
        remedy = f"plan with {option}={{{end.name!r}: {whole!r}}}{other}"
        raise PlanError(f"{end.name} is a plain tensor planned in {layout}, {what} would have to be gathered", remedy=remedy)


def write_back(target: torch.Tensor, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], bound: BoundProgram) -> None:
    """Copies the new value of a mutated buffer or input into the user's tensor, unless the program already wrote it there."""
    held = target.to_local() if isinstance(target, DTensor) else target
    if held.data_ptr() == local.data_ptr() and held.stride() == local.stride() and held.dtype == local.dtype:
        return
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(local)
        else:
            target.copy_(global_result(local, layout, shape, bound, False))


def shapes_text(named: Mapping[str, Any]) -> str:
    """The shapes of a call's arguments by name, and the values of arguments that are not tensors; for log messages."""
    return ", ".join(
        f"{name} {tuple(x.shape)}" if isinstance(x, torch.Tensor) and not is_length(x) else f"{name}={length_of(x)!r}"
        for name, x in named.items()
    )


def other_calls_text(dims: Sequence[DynamicDim], named: Mapping[str, Any]) -> str:
    """Which other calls a program with these dynamic ``dims`` serves, besides the call of ``named``; for log messages."""
    counts = [path for dim in dims for path, _ in dim.places if is_length(named.get(path))]
    sizes = [str(dim) for dim in dims if not any(is_length(named.get(path)) for path, _ in dim.places)]
    odd = ", odd ones too" if any(dim.uneven for dim in dims) else ""
    said = [f"any other sizes of {'; '.join(sizes)}{odd}"] if sizes else []
    return "".join(f", and {one}" for one in (*said, *([f"any other {', '.join(counts)}"] if counts else [])))
