"""Collects the global values of a program's inputs from a model and its arguments, by name, and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensor
from fxshard.errors import RunError
from fxshard.graph.objects import CallResult, Opened, open_call
from fxshard.graph.planning_graph import UNKNOWN, constants_of
from fxshard.program.sharded_program import ShardedProgram
from fxshard.shapes.arguments import path_name

ANY_SIZE = "for any size: dynamic_shapes=, --dynamic"
CALL_REMEDY = f"give arguments like those of the example, or plan (export) again for these, or {ANY_SIZE}"
SHAPES_REMEDY = f"give tensors of the shapes and dtypes of the example, or plan (export) again for these, or {ANY_SIZE}"


def program_values(
    program: ShardedProgram,
    model: nn.Module | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    tangents: Any = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """One global tensor per entry of ``program.inputs``; raises RunError if one is missing or has another shape or dtype than traced."""
    args, kwargs, _ = open_call(args, kwargs or {})
    check_arguments(program, args, kwargs)
    named = dict(weights or {})
    if model is not None:
        named.update({n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)})
        named.update(dict(model.named_buffers(remove_duplicate=False)))
    named.update(argument_values(args, kwargs))
    flat_tangents = None if tangents is None else pytree.tree_leaves(tangents)
    values = []
    for end, shape, dtype in zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True):
        if end.kind == "seed":
            value = torch.randint(0, 2**62, (), dtype=torch.int64)
        elif end.kind == "tangent":
            value = _tangent(end.name, shape, dtype, flat_tangents)
        elif end.name in named:
            value = named[end.name].detach()
        else:
            weight = end.kind in ("parameter", "buffer")
            remedy = (
                "give whole tensors by the model's names: the model, or weights= (fxshard run --weights FILE)" if weight else CALL_REMEDY
            )
            raise RunError(f"no value for {end.kind} {end.name!r}", remedy=remedy)
        if isinstance(value, DTensor):
            raise RunError(
                f"{end.kind} {end.name!r} is a DTensor, a shard of one rank", remedy="give a whole tensor: the simulator shards it"
            )
        check_value(end.name, value, shape, dtype)
        check_has_data(end.kind, end.name, value)
        values.append(value)
    return values


def returned_by_model(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, changed: Mapping[str, torch.Tensor]) -> Any:
    """The return value of a model, from a program's outputs: rebuilds objects as copies, so that those of the call stay unchanged.

    ``changed``: new values of arguments by name.
    """
    if not isinstance(result, CallResult):
        return result
    paths = pytree.tree_flatten_with_path(open_call(args, kwargs or {})[:2])[0]
    return result.on_copies([changed.get(path_name(path), value) for path, value in paths])


def argument_values(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Tensors among the arguments by path: ``args[0]``, ``kwargs['mask']``."""
    paths = pytree.tree_flatten_with_path(open_call(args, kwargs or {})[:2])[0]
    return {path_name(path): value for path, value in paths if isinstance(value, torch.Tensor)}


def sizes_of_call(program: ShardedProgram, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, int]:
    """The dynamic sizes of a call by name; raises RunError for a missing tensor, or if dims of one name differ."""
    named, found = argument_values(args, kwargs), dict[str, int]()
    for one in program.sizes:
        for path, dim in one.places:
            if path not in named or named[path].dim() <= dim:
                raise RunError(f"{path} has no dim {dim}, which gives {one.name}", remedy=CALL_REMEDY)
            if found.setdefault(one.name, named[path].shape[dim]) != named[path].shape[dim]:
                raise RunError(f"dim {dim} of {path} is {named[path].shape[dim]}, {one.name} is {found[one.name]}", remedy=SHAPES_REMEDY)
    return found


def check_arguments(program: ShardedProgram, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Raises RunError for the first argument that is missing, unexpected, or has another structure or constant value than when traced."""
    spec = pytree.tree_structure((tuple(args), dict(kwargs or {})))
    said = structure_difference(program.in_spec, spec) or _constant_difference(program, args, kwargs)
    if said is not None:
        raise RunError(said, remedy=CALL_REMEDY)


def structure_difference(want: pytree.TreeSpec, have: pytree.TreeSpec, name: str = "") -> str | None:
    """The first difference between the structures of two calls' ``(args, kwargs)``, in words; keywords may have any order."""
    if want.is_leaf() or have.is_leaf():
        if want.is_leaf() and have.is_leaf():
            return None
        return f"{name} is {_container(have)}, the program was traced with {_container(want)}"
    if want.type is Opened and have.type is Opened:
        return _object_difference(want, have, name)
    parts, given = _parts(want, name), _parts(have, name)
    one, other = _class(want), _class(have)
    if one is not other and not (issubclass(one, dict) and issubclass(other, dict)):
        return f"{name} is {_container(have)}, the program was traced with {_container(want)}"
    for part in (p for p in parts if p not in given):
        return f"the argument {part} is missing"
    for part in (p for p in given if p not in parts):
        return f"the argument {part} is unexpected"
    return next((said for part in parts if (said := structure_difference(parts[part], given[part], part)) is not None), None)


def _object_difference(want: pytree.TreeSpec, have: pytree.TreeSpec, name: str) -> str | None:
    if want.context == have.context:
        return None
    before, now = want.context[0].kind, have.context[0].kind
    if before is not now:
        return f"{name} is a {now.__name__}, the program was traced with a {before.__name__}"
    return f"{name} is a {now.__name__} in another state than when the program was traced (numbers in it, or how many tensors)"


def _parts(spec: pytree.TreeSpec, name: str) -> dict[str, pytree.TreeSpec]:
    """The children of a container by their paths."""
    children = spec.children()
    if not name:
        return dict(zip(("args", "kwargs"), children, strict=True))
    named = issubclass(_class(spec), dict) and isinstance(spec.context, list)
    keys = spec.context if named else range(len(children))
    return {f"{name}[{key!r}]": child for key, child in zip(keys, children, strict=True)}


def _container(spec: pytree.TreeSpec) -> str:
    return "a single value" if spec.is_leaf() else f"a {_class(spec).__name__}"


def _class(spec: pytree.TreeSpec) -> type:
    """The class of a container; for a namedtuple a pytree holds it in its context."""
    return spec.type if isinstance(spec.type, type) else spec.context


def _constant_difference(program: ShardedProgram, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> str | None:
    have = constants_of(args, kwargs)
    for name, value in program.constants.items():
        if name not in have:
            return f"{name} is a tensor, the program was traced with {value!r}"
        if type(value) is not type(have[name]) or repr(value) != repr(have[name]):
            return f"{name} is {have[name]!r}, the program was traced with {value!r}"
    for end in program.inputs:
        if end.kind == "input" and end.name in have:
            return f"{end.name} is {have[end.name]!r}, the program was traced with a tensor"
    return None


def check_value(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    """Raises RunError unless ``value`` has the shape and dtype that the program was traced with."""
    if not _has_shape(value, shape) or str(value.dtype) != dtype:
        raise RunError(
            f"{name} is {tuple(value.shape)} {value.dtype}, the program takes {shape} {dtype}",
            remedy=SHAPES_REMEDY,
        )


def _has_shape(value: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return value.dim() == len(shape) and all(want in (have, UNKNOWN) for have, want in zip(value.shape, shape, strict=True))


def check_has_data(kind: str, name: str, value: torch.Tensor) -> None:
    """Raises RunError for a tensor without data: on meta, or fake."""
    if not value.is_meta and not isinstance(value, FakeTensor):
        return
    weight = kind in ("parameter", "buffer")
    remedy = "call model.to_empty(device=...) on every rank and load or initialise the weights before the first call"
    raise RunError(
        f"{kind} {name} has no memory: it is {'on meta' if value.is_meta else 'a fake tensor'}",
        remedy=remedy if weight else "give a tensor that holds values",
    )


def _tangent(name: str, shape: tuple[int, ...], dtype: str, given: list[Any] | None) -> torch.Tensor:
    if given is None and any(size < 0 for size in shape):
        remedy = "give tangents=, sum the output inside the model, or plan with train=False"
        raise RunError(f"the size of an output depends on the data, so a tangent of ones ({name}) cannot be made", remedy=remedy)
    if given is None:
        return torch.ones(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    index = int(name.removeprefix("tangents[").removesuffix("]"))
    if index >= len(given) or not isinstance(given[index], torch.Tensor):
        raise RunError(f"tangents has no tensor for output {index}", remedy="give one tensor per output, in the outputs' structure")
    return given[index].detach()
