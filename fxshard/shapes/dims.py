"""Which dims of a call's tensors are dynamic, as given by ``torch.export.Dim``, by a name, or by ``mark_dynamic``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from fxshard._torch_compat import pytree
from fxshard._torch_compat.symbols import marked_dims
from fxshard.errors import OptionError, a_kind

REMEDY = "give {'args[0]': {0: Dim('batch'), 1: 'seq'}}, or a tuple or a mapping by argument as torch.export takes"
HINTS = {"DYNAMIC", "AUTO"}


@dataclass(frozen=True)
class DynamicDim:
    """A size that may change from call to call.

    ``places``: every (path of the tensor, dim) that has this size, such as ``args[0]`` and 1; ``example``: its value in the example;
    ``least``, ``most``: the user's range, both included. ``asked``: whether the user requires it to be dynamic; otherwise tracing may find
    it static. ``uneven``: whether shards of unequal sizes are supported, so that any size is allowed.
    """

    name: str
    places: tuple[tuple[str, int], ...]
    example: int
    least: int = 1
    most: int | None = None
    asked: bool = True
    uneven: bool = False

    def __str__(self) -> str:
        return ", ".join(f"dim {dim} of {path}" for path, dim in self.places)

    def serves(self, size: int) -> bool:
        """Whether a size is in the range."""
        return self.least <= size and (self.most is None or size <= self.most)

    def check(self, size: int) -> None:
        """Raises OptionError for a size outside the range."""
        if not self.serves(size):
            span = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise OptionError(
                f"{self.name} ({self}) is {size}, it may be {span}", remedy="give the Dim another range, or plan for this size"
            )


def dynamic_dims(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any = None) -> tuple[DynamicDim, ...]:
    """The dynamic dims of a call ``model(*args, **kwargs)``, in the order in which they are found.

    ``given``: a mapping from paths (``"args[0]"``) or names of arguments to their dynamic dims, or a sequence of these in the order of
    ``args``. The entry of a tensor maps dims to ``torch.export.Dim`` objects or names, or is a sequence with one entry per dim; the entry
    of a container has one entry per part. Dims with the same name have the same size. Dims marked by torch's ``mark_dynamic`` are dynamic
    too.

    Raises OptionError for an argument or dim that does not exist, for an entry of the wrong kind, for one name with two sizes, and for a
    size outside the range of a dim that the user requires to be dynamic.
    """
    leaves = {_path(path): leaf for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]}
    found = [*_given(given, _arguments(model.forward, args, kwargs), leaves), *_marked(leaves)]
    dims: dict[str, DynamicDim] = {}
    taken: set[tuple[str, int]] = set()
    for one in found:
        if one.places[0] in taken:
            continue
        taken.add(one.places[0])
        if not one.asked and not one.serves(one.example):
            continue
        one.check(one.example)
        known = dims.get(one.name)
        if known is None:
            dims[one.name] = one
            continue
        if known.example != one.example:
            raise OptionError(
                f"{one.name!r} is {known.example} in {known} and {one.example} in {one}",
                remedy="give dims of different sizes different names",
            )
        dims[one.name] = replace(known, places=(*known.places, *one.places))
    return tuple(dims.values())


def _path(path: tuple[Any, ...]) -> str:
    return ("args" if path[0].idx == 0 else "kwargs") + pytree.keystr(path[1:])


def _arguments(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """(path, value) of each argument, by its path and by its name in the signature of ``forward``."""
    found = {f"args[{i}]": (f"args[{i}]", value) for i, value in enumerate(args)}
    found |= {f"kwargs[{name!r}]": (f"kwargs[{name!r}]", value) for name, value in kwargs.items()}
    found |= {name: (f"kwargs[{name!r}]", value) for name, value in kwargs.items()}
    try:
        names = [n for n, p in inspect.signature(forward).parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):
        names = []
    return {**{name: (f"args[{i}]", value) for i, (name, value) in enumerate(zip(names, args, strict=False))}, **found}


def _given(given: Any, arguments: Mapping[str, tuple[str, Any]], leaves: Mapping[str, Any]) -> Iterator[DynamicDim]:
    if given is None:
        return
    if isinstance(given, Mapping):
        entries = list(given.items())
    elif isinstance(given, Sequence) and not isinstance(given, str):
        entries = [(f"args[{i}]", entry) for i, entry in enumerate(given)]
    else:
        raise OptionError(f"dynamic_shapes is {a_kind(given)}", where="dynamic_shapes", remedy=REMEDY)
    for name, entry in entries:
        if name in arguments:
            yield from _of_value(entry, *arguments[name])
        elif name in leaves:
            yield from _of_value(entry, name, leaves[name])
        else:
            raise OptionError(f"there is no argument {name!r}", where="dynamic_shapes", remedy=f"its arguments are {', '.join(leaves)}")


def _of_value(entry: Any, path: str, value: Any) -> Iterator[DynamicDim]:
    if entry is None:
        return
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(entry, path, value)
    elif isinstance(value, Mapping) and isinstance(entry, Mapping) and set(entry) <= set(value):
        for key, one in entry.items():
            yield from _of_value(one, f"{path}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)) and isinstance(entry, (list, tuple)) and len(entry) == len(value):
        for i, one in enumerate(entry):
            yield from _of_value(one, f"{path}[{i}]", value[i])
    else:
        what = f"{path} is {a_kind(value)}, which {entry!r:.60} does not describe"
        raise OptionError(what, where="dynamic_shapes", remedy="only tensors have dims; describe the parts of a container as it holds them")


def _of_tensor(entry: Any, path: str, value: torch.Tensor) -> Iterator[DynamicDim]:
    pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry) if isinstance(entry, (list, tuple)) else None
    if pairs is None:
        raise OptionError(f"cannot read {entry!r:.60} for {path}", where="dynamic_shapes", remedy=REMEDY)
    for dim, said in pairs:
        if not isinstance(dim, int) or isinstance(dim, bool) or not -value.dim() <= dim < value.dim():
            raise OptionError(
                f"{path} has no dim {dim!r}, it has {value.dim()}", where="dynamic_shapes", remedy="name dims by their number"
            )
        one = _read(said, path, dim % value.dim(), int(value.shape[dim]))
        if one is not None:
            yield one


def _read(said: Any, path: str, dim: int, size: int) -> DynamicDim | None:
    """The dim that an entry of the user's describes; None if it is static."""
    place = ((path, dim),)
    if isinstance(said, int) and not isinstance(said, bool) and said != size:
        what = f"dim {dim} of {path} is {size}, not {said}"
        raise OptionError(what, where="dynamic_shapes", remedy="give None or its size where it is static")
    if (
        said is None
        or (isinstance(said, int) and not isinstance(said, bool))
        or getattr(getattr(said, "type", None), "name", "") == "STATIC"
    ):
        return None
    if isinstance(said, str):
        return DynamicDim(said, place, size)
    if getattr(getattr(said, "type", None), "name", "") in HINTS:
        return DynamicDim(_own_name(path, dim), place, size, said.min or 1, said.max, asked=said.type.name == "DYNAMIC")
    if isinstance(said, Dim) and type(said) is Dim:
        most = None if said.max > 2**31 else int(said.max)
        return DynamicDim(said.__name__, place, size, max(int(said.min), 1), most)
    raise OptionError(
        f"cannot read {said!r:.60} for dim {dim} of {path}", where="dynamic_shapes", remedy="give a torch.export.Dim or a name"
    )


def _own_name(path: str, dim: int) -> str:
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', path).strip('_')}_{dim}"


def _marked(leaves: Mapping[str, Any]) -> Iterator[DynamicDim]:
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            for dim in sorted(marked_dims(leaf)):
                yield DynamicDim(_own_name(path, dim), ((path, dim),), int(leaf.shape[dim]))
