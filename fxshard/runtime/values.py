"""The global values of a program's inputs, collected from a model and its arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxshard._torch_compat import pytree
from fxshard.errors import RunError
from fxshard.program import ShardedProgram


def program_values(
    program: ShardedProgram,
    model: nn.Module | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    tangents: Any = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """One global tensor per entry of ``program.inputs``; raises RunError for what is missing or has another shape."""
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
            raise RunError(f"no value for {end.kind} {end.name!r}", remedy="pass the arguments that the program was traced with")
        check_value(end.name, value, shape, dtype)
        values.append(value)
    return values


def argument_values(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Tensors among the arguments by path: ``args[0]``, ``kwargs['mask']``."""
    found = {}
    for path, value in pytree.tree_flatten_with_path((tuple(args), dict(kwargs or {})))[0]:
        if isinstance(value, torch.Tensor):
            found[("args" if path[0].idx == 0 else "kwargs") + pytree.keystr(path[1:])] = value
    return found


def check_value(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    """Raises RunError unless ``value`` has the shape and dtype that the program was traced with."""
    if tuple(value.shape) != shape or str(value.dtype) != dtype:
        raise RunError(
            f"{name} is {tuple(value.shape)} {value.dtype}, the program takes {shape} {dtype}",
            remedy="plan and lower again for these shapes",
        )


def _tangent(name: str, shape: tuple[int, ...], dtype: str, given: list[Any] | None) -> torch.Tensor:
    if given is None:
        return torch.ones(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    index = int(name.removeprefix("tangents[").removesuffix("]"))
    if index >= len(given) or not isinstance(given[index], torch.Tensor):
        raise RunError(f"tangents has no tensor for output {index}", remedy="give one tensor per output, in the outputs' structure")
    return given[index].detach()
