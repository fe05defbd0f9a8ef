"""Which dims of a call's tensors are dynamic, as given by ``torch.export.Dim``, by a name, or by ``mark_dynamic``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.export import Dim

from fxshard._torch_compat import pytree
from fxshard._torch_compat.sizes.symbols import marked_dims
from fxshard.errors import OptionError, a_kind, closest
from fxshard.shapes.arguments import Arguments, path_name
from fxshard.size_words import MAX_NAME, range_text

REMEDY = "give {'args[0]': {0: Dim('batch'), 1: 'seq'}}, or a tuple or a mapping by argument as torch.export takes"
HINTS = {"DYNAMIC", "AUTO"}

CallPlace = Literal["only", "example", "later"]
"""The place of a call among all calls: the only one, an example that others follow, or a later one."""


class Ranged:
    """A size from ``least`` to ``most``, both included; None: without an upper end."""

    least: int
    most: int | None

    def allows(self, size: int) -> bool:
        """Whether a size is in the range."""
        return self.least <= size and (self.most is None or size <= self.most)

    @property
    def span(self) -> str:
        """The range in words."""
        return range_text(self.least, self.most)


@dataclass(frozen=True)
class DynamicDim(Ranged):
    """A size that may change from call to call.

    ``places``: every (path of the tensor, dim) that has this size, such as ``args[0]`` and 1; ``example``: its value in the example;
    ``least``, ``most``: the user's range, both included. ``required``: whether the user requires that it is dynamic; otherwise tracing may
    find it static. ``uneven``: whether shards of unequal sizes are supported, so that any size is allowed.
    """

    name: str
    places: tuple[tuple[str, int], ...]
    example: int
    least: int = 1
    most: int | None = None
    required: bool = True
    uneven: bool = False

    def __str__(self) -> str:
        return ", ".join(f"dim {dim} of {path}" for path, dim in self.places)

    def check(self, size: int) -> None:
        """Raises OptionError for a size outside the range."""
        if not self.allows(size):
            remedy = "give the Dim another range, or plan for this size"
            raise OptionError(f"{self.name} ({self}) is {size}, it must be {self.span}", remedy=remedy)


def dynamic_dims(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], given: Any = None, *, call: CallPlace = "only"
) -> tuple[DynamicDim, ...]:
    """The dynamic dims of a call ``model(*args, **kwargs)``, in the order in which they are found.

    ``given``: a mapping from paths (``"args[0]"``) or names of arguments to their dynamic dims, or a sequence of these in the order of
    the parameters. The entry of a tensor maps dims to ``torch.export.Dim`` objects or names, or is a sequence with one entry per dim; the
    entry of a container has one entry per part. Dims with the same name have the same size and range. Dims marked by torch's
    ``mark_dynamic`` are dynamic too, within the range of the mark; those of equal size in different tensors are one dim.

    ``call``: ``"example"`` if calls with other arguments follow, so that ``given`` may name parameters that this call does not pass;
    ``"later"`` for these calls, in which parts of containers may be missing too. Nothing is read for what is missing or None.

    Raises OptionError for an argument or dim that does not exist, for an entry of the wrong kind, for one name with two sizes or ranges,
    and for a dim with two names.
    """
    leaves = {path_name(path): leaf for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]}
    reader = _Reader(Arguments(model.forward, args, kwargs), leaves, call, _ranges(given))
    named = _joined(reader.read(given))
    marks = list(_marked(leaves))
    taken = {place for dim in named for place in dim.places}
    return (*(_within_marks(dim, marks) for dim in named), *_grouped([mark for mark in marks if mark.places[0] not in taken]))


def _joined(found: Iterable[DynamicDim]) -> list[DynamicDim]:
    """The dims that ``found`` names place by place, those of one name joined. Raises OptionError for a contradiction."""
    dims: dict[str, DynamicDim] = {}
    names: dict[tuple[str, int], str] = {}
    for one in found:
        place, known = one.places[0], dims.get(one.name)
        if len(one.name) > MAX_NAME:
            what = f"the name {one.name[:40]!r}... has {len(one.name)} characters"
            raise OptionError(what, where="dynamic_shapes", remedy=f"give it one of at most {MAX_NAME}")
        if names.setdefault(place, one.name) != one.name:
            what = f"{one} has two names, {names[place]!r} and {one.name!r}"
            raise OptionError(what, where="dynamic_shapes", remedy="name each dim of an argument once")
        if known is None:
            dims[one.name] = one
        elif known.example != one.example:
            raise OptionError(
                f"{one.name!r} is {known.example} in {known} and {one.example} in {one}",
                remedy="give dims of different sizes different names",
            )
        elif place not in known.places:
            dims[one.name] = replace(known, places=(*known.places, *one.places))
    return list(dims.values())


def _ranges(given: Any) -> dict[str, tuple[int, int | None]]:
    """(least, most) of each ``torch.export.Dim`` within ``given``, by name; raises OptionError for one name with two ranges."""
    found: dict[str, tuple[int, int | None]] = {}
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    for part in parts:
        inner = {part.__name__: _range_of(part)} if _is_dim(part) else _ranges(part)
        for name, span in inner.items():
            if found.setdefault(name, span) != span:
                what = f"{name!r} is {range_text(*found[name])} in one place and {range_text(*span)} in another"
                raise OptionError(what, where="dynamic_shapes", remedy="use one Dim object for all dims of that name")
    return found


def _is_dim(said: Any) -> bool:
    return isinstance(said, Dim) and type(said) is Dim


def _range_of(dim: Any) -> tuple[int, int | None]:
    return max(int(dim.min), 1), None if dim.max > 2**31 else int(dim.max)


@dataclass(frozen=True)
class _Reader:
    """Reads what the user says of a call's ``arguments``, whose ``leaves`` are given by path. ``ranges``: those of the dims by name."""

    arguments: Arguments
    leaves: Mapping[str, Any]
    call: CallPlace
    ranges: Mapping[str, tuple[int, int | None]]

    def read(self, given: Any) -> Iterator[DynamicDim]:
        """One dim per place, in the order in which ``given`` names them."""
        if given is None:
            return
        if isinstance(given, Mapping):
            entries = list(given.items())
        elif isinstance(given, Sequence) and not isinstance(given, str):
            entries = [(f"args[{i}]", entry) for i, entry in enumerate(given)]
        else:
            raise OptionError(f"dynamic_shapes is {a_kind(given)}", where="dynamic_shapes", remedy=REMEDY)
        for name, entry in entries:
            argument, rest = self.arguments.split(str(name))
            path, value = self.arguments.by_name.get(argument, ("", None))
            if path and (not rest or path + rest in self.leaves):
                yield from self._of_value(entry, path + rest, self.leaves[path + rest] if rest else value)
            elif not self._may_lack(argument, rest, value) and entry is not None:
                raise self._unknown(name)

    def _may_lack(self, argument: str, rest: str, value: Any) -> bool:
        """Whether this call may lack the part ``rest`` of an argument, whose ``value`` is None if it is not passed."""
        return self.call != "only" and self.arguments.could_have(argument) and (self.call == "later" or not rest or value is None)

    def _unknown(self, name: Any) -> OptionError:
        known = list(self.leaves) if self.call == "only" else [*self.arguments.parameter_names, *self.leaves]
        what = f"there is no argument {name!r}{closest(name, [*self.arguments.parameter_names, *known])}"
        return OptionError(what, where="dynamic_shapes", remedy=f"its arguments are {', '.join(known)}")

    def _of_value(self, entry: Any, path: str, value: Any) -> Iterator[DynamicDim]:
        """``entry`` describes ``value``, the argument or part of one at ``path``."""
        if entry is None or (value is None and self.call != "only"):
            return
        later = self.call == "later"
        if isinstance(value, torch.Tensor):
            yield from _of_tensor(entry, path, value, self.ranges)
        elif isinstance(value, Mapping) and isinstance(entry, Mapping) and (later or set(entry) <= set(value)):
            for key, one in entry.items():
                yield from self._of_value(one, f"{path}[{key!r}]", value.get(key))
        elif isinstance(value, (list, tuple)) and isinstance(entry, (list, tuple)) and (later or len(entry) == len(value)):
            for i, (one, part) in enumerate(zip(entry, value, strict=not later)):
                yield from self._of_value(one, f"{path}[{i}]", part)
        elif not later:
            what = f"{path} is {a_kind(value)}, which {entry!r:.60} does not describe"
            remedy = "only tensors have dims; describe the parts of a container as it holds them"
            raise OptionError(what, where="dynamic_shapes", remedy=remedy)


def _of_tensor(entry: Any, path: str, value: torch.Tensor, ranges: Mapping[str, tuple[int, int | None]]) -> Iterator[DynamicDim]:
    pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry) if isinstance(entry, (list, tuple)) else None
    if pairs is None:
        raise OptionError(f"cannot read {entry!r:.60} for {path}", where="dynamic_shapes", remedy=REMEDY)
    for dim, said in pairs:
        if not isinstance(dim, int) or isinstance(dim, bool) or not -value.dim() <= dim < value.dim():
            raise OptionError(
                f"{path} has no dim {dim!r}, it has {value.dim()}", where="dynamic_shapes", remedy="name dims by their number"
            )
        one = _read(said, path, dim % value.dim(), int(value.shape[dim]), ranges)
        if one is not None and (one.required or one.allows(one.example)):
            one.check(one.example)
            yield one


def _read(said: Any, path: str, dim: int, size: int, ranges: Mapping[str, tuple[int, int | None]]) -> DynamicDim | None:
    """The dim that an entry of the user's describes; None if it is static. A name alone has the range that ``ranges`` gives for it."""
    place = ((path, dim),)
    if isinstance(said, int) and not isinstance(said, bool) and said != size:
        what = f"dim {dim} of {path} is {size}, not {said}"
        raise OptionError(what, where="dynamic_shapes", remedy="give None or its size where it is static")
    hint = getattr(getattr(said, "type", None), "name", "")
    if said is None or (isinstance(said, int) and not isinstance(said, bool)) or hint == "STATIC":
        return None
    if isinstance(said, str) or _is_dim(said):
        name = said if isinstance(said, str) else said.__name__
        return DynamicDim(name, place, size, *ranges.get(name, (1, None)))
    if hint in HINTS:
        return DynamicDim(_own_name(path, dim), place, size, said.min or 1, said.max, required=hint == "DYNAMIC")
    raise OptionError(
        f"cannot read {said!r:.60} for dim {dim} of {path}", where="dynamic_shapes", remedy="give a torch.export.Dim or a name"
    )


def _own_name(path: str, dim: int) -> str:
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', path).strip('_')}_{dim}"


def _marked(leaves: Mapping[str, Any]) -> Iterator[DynamicDim]:
    """One dim per mark of torch's."""
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            for dim, (least, most) in sorted(marked_dims(leaf).items()):
                one = DynamicDim(_own_name(path, dim), ((path, dim),), int(leaf.shape[dim]), least, most)
                one.check(one.example)
                yield one


def _within_marks(dim: DynamicDim, marks: Sequence[DynamicDim]) -> DynamicDim:
    """``dim`` within the ranges of those ``marks`` that are of its places."""
    own = [mark for mark in marks if mark.places[0] in dim.places]
    most = [one.most for one in (dim, *own) if one.most is not None]
    found = replace(dim, least=max(one.least for one in (dim, *own)), most=min(most, default=None))
    found.check(found.example)
    return found


def _grouped(marks: Sequence[DynamicDim]) -> list[DynamicDim]:
    """Marks of equal size joined, at most one of each tensor: as for ``dynamic=True``, a mark has no name that tells dims apart."""
    groups: list[DynamicDim] = []
    for mark in marks:
        path = mark.places[0][0]
        at = next((i for i, one in enumerate(groups) if one.example == mark.example and path not in dict(one.places)), None)
        if at is None:
            groups.append(mark)
        else:
            joined = replace(groups[at], places=(*groups[at].places, *mark.places))
            groups[at] = _within_marks(joined, [mark])
    return groups
