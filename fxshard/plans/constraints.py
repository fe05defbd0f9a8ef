"""Constraints that a user may put on a plan, besides pins and a memory limit: small values in one list.

    constraints=[
        fxshard.Pin("layers.*.mlp", "S(0)R"),
        fxshard.Equal("layers.*.wq.weight"),
        fxshard.Forbid("layers.*.wo.weight", "S(1)", axis="dp"),
        fxshard.Communication("dp", at_most=2**30),
    ]

A name is that of a parameter, buffer, input, output, submodule (for what it returns) or graph node, or a glob over these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from fxshard.byte_sizes import read_size
from fxshard.errors import OptionError, a_kind
from fxshard.layout.layouts import placement_str


@dataclass(frozen=True)
class Pin:
    """Fixes the layout of whatever ``name`` matches; axes given as None, or ``*`` in a text, stay free."""

    name: str
    layout: Any

    def __post_init__(self) -> None:
        _check_name(self, self.name)

    def __str__(self) -> str:
        return f"Pin({self.name!r}, {shown(self.layout)})"


@dataclass(frozen=True)
class Forbid:
    """Forbids a layout for whatever ``name`` matches; with ``axis``, ``layout`` is one placement, forbidden on that axis.

    If a match has several results, the layout is forbidden for all of them.
    """

    name: str
    layout: Any
    axis: str | None = None

    def __post_init__(self) -> None:
        _check_name(self, self.name)

    def __str__(self) -> str:
        return f"Forbid({self.name!r}, {shown(self.layout)}{f', axis={self.axis!r}' if self.axis is not None else ''})"


@dataclass(frozen=True, init=False)
class Equal:
    """Everything that these names match has the same layout."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)
        for name in names or (None,):
            _check_name(self, name)

    def __str__(self) -> str:
        return f"Equal({', '.join(map(repr, self.names))})"


@dataclass(frozen=True)
class Communication:
    """Limits the bytes (``2**30``, ``"1GB"``) that all collectives of the plan on ``axis`` together send per rank and step."""

    axis: str
    at_most: float

    def __post_init__(self) -> None:
        _check_name(self, self.axis)
        object.__setattr__(self, "at_most", read_size(self.at_most, "at_most"))

    def __str__(self) -> str:
        return f"Communication({self.axis!r}, at_most={self.at_most!r})"


class Held(dict[str, Placement]):
    """The layout of a DTensor, in the place of a pin or input layout that nobody wrote: its placements by axis; other axes are free.

    ``movable``: whether the user may say otherwise, so that the plan moves it.
    """

    def __init__(self, placements: Mapping[str, Placement], movable: bool = True) -> None:
        super().__init__(placements)
        self.movable = movable

    def text(self, name: str, option: str) -> str:
        """What errors call it; ``option``: where the user may say otherwise."""
        layout = " and ".join(f"{placement_str(placement)} on {axis}" for axis, placement in self.items())
        otherwise = f" ({option}= would count instead)" if self.movable else ""
        return f"{name} in {layout}, as the DTensor that it is already{otherwise}"


Constraint = Pin | Equal | Forbid | Communication
OBJECTIVES = ("time", "communication")
"""What a plan may minimise: microseconds of a step, or bytes sent per rank."""
KINDS = (Pin, Equal, Forbid, Communication)


def names_in(constraint: Constraint) -> tuple[str, ...]:
    """The names of tensors in a constraint."""
    if isinstance(constraint, Communication):
        return ()
    return constraint.names if isinstance(constraint, Equal) else (constraint.name,)


def check_constraints(given: Any) -> tuple[Constraint, ...]:
    """``given`` as a tuple; raises OptionError unless all are constraints."""
    if given is None:
        return ()
    remedy = "give a list of fxshard.Pin, Equal, Forbid and Communication"
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise OptionError(f"constraints are given as {a_kind(given)}, not as a list", where="constraints", remedy=remedy)
    for one in given:
        if not isinstance(one, KINDS):
            raise OptionError(f"{one!r:.60} among the constraints is {a_kind(one)}", where="constraints", remedy=remedy)
    return tuple(given)


def shown(layout: Any) -> str:
    """A layout in the user's notation."""
    if isinstance(layout, Mapping):
        return "{" + ", ".join(f"{k}: {shown([v])}" for k, v in layout.items()) + "}"
    if isinstance(layout, str):
        return repr(layout)
    if isinstance(layout, Placement):
        return placement_str(layout)
    if isinstance(layout, Sequence) and all(p is None or isinstance(p, Placement) for p in layout):
        return "".join("*" if p is None else placement_str(p) for p in layout)
    return repr(layout)


def _check_name(constraint: Constraint, name: Any) -> None:
    if not isinstance(name, str) or not name:
        kind = type(constraint).__name__
        axis = "the name of a mesh axis, as text" if isinstance(constraint, Communication) else "a name or glob, as text"
        raise OptionError(f"{kind} needs {axis}, not {name!r}", where="constraints", remedy=f"write {_EXAMPLES[kind]}")


_EXAMPLES = {
    "Pin": "fxshard.Pin('layers.*.mlp', 'S(0)R')",
    "Equal": "fxshard.Equal('layers.*.wq.weight', 'layers.0.wq.weight')",
    "Forbid": "fxshard.Forbid('layers.*.wq.weight', 'S(1)', axis='dp')",
    "Communication": "fxshard.Communication('dp', at_most=2**30)",
}
