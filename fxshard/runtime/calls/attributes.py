"""Python attributes that a model's forward may read: numbers, strings and flags of its modules, and tensors that are not buffers.

A traced graph contains their values as constants.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Collection
from operator import is_

import torch
from torch import nn

from fxshard.errors import PlanError, RunError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.graph.side_effects import Attribute
from fxshard.plans.sharding_plan import ShardingPlan

log = logging.getLogger("fxshard")
PLAIN_TYPES = (bool, int, float, str, type(None))
Attributes = tuple[tuple[tuple[str, object], ...], ...]
"""For each module (name, value) of its plain attributes, including ``training``, and of its tensors as ``TensorRef``."""


NEW_PROGRAM_EACH_VALUE = (
    "the forward of %s reads its attribute %s, which changes at each call: each value needs a program of its own; keep it in a buffer, "
    "self.register_buffer(%r, torch.tensor(...)), and change that with fill_()"
)
MAX_VALUES = 8
"""The number of values of one attribute, set by the forward itself, that may each have a program."""


class TensorRef:
    """A weak reference to a tensor among the attributes, equal only to references to the same tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.ref, self.kind = weakref.ref(value), (value.shape, value.dtype, value.device)

    def __eq__(self, other: object) -> bool:
        mine = self.ref()
        return self is other or (isinstance(other, TensorRef) and mine is not None and mine is other.ref())

    def __hash__(self) -> int:
        return id(self)


class AttributeReader:
    """Reads the attributes of a model's modules on each call; rebuilds only those of modules that changed."""

    def __init__(self, model: nn.Module) -> None:
        self.snapshots = [_Snapshot(vars(module)) for module in model.modules()]
        self.last: Attributes = tuple(seen.found for seen in self.snapshots)

    def current(self) -> Attributes:
        """The current attributes; for an unchanged module, or model, the same object as before."""
        if not all(map(_Snapshot.unchanged, self.snapshots)):
            self.snapshots = [seen if seen.unchanged() else _Snapshot(seen.state) for seen in self.snapshots]
            self.last = tuple(seen.found for seen in self.snapshots)
        return self.last


class AttributeHistory:
    """The attributes that calls of a model set (``written``), those that changed between calls (``changed``), and the values that its
    programs contain as constants."""

    def __init__(self, model: str) -> None:
        self.model, self.written, self.changed = model, frozenset[Attribute](), frozenset[Attribute]()
        self.values: dict[Attribute, list[object]] = {}

    def copied(self) -> AttributeHistory:
        """A history of its own for a copy of the model."""
        new = copy.copy(self)
        new.values = {attribute: [*values] for attribute, values in self.values.items()}
        return new

    def record(self, graph: PlanningGraph, now: Attributes, plan: ShardingPlan | None = None) -> None:
        """Records a call that was traced with the attributes ``now``.

        Raises RunError for an attribute that the forward keeps changing, and PlanError for a ``plan`` whose graph does not return the
        tensors that the forward stores in attributes.
        """
        effects = graph.side_effects
        if effects is None:
            return
        if plan is not None and plan.graph_hash != graph.hash and effects.reads:
            paths = ", ".join(write.path for write in effects.writes)
            what = f"the plan does not return the tensors that the forward of {self.model} stores in attributes ({paths})"
            raise PlanError(what, remedy="let parallelize plan, or return those tensors from the forward instead")
        self.written |= {write.attribute for write in effects.writes}
        for (place, name), path, where in effects.read:
            seen, value = self.values.setdefault((place, name), []), dict(now[place]).get(name)
            if value in seen or (isinstance(value, TensorRef) and (place, name) not in graph.fixed):
                continue
            if len(seen) == MAX_VALUES and (place, name) in self.written:
                what = f"the forward of {self.model} sets its attribute {path} and computes with its previous value"
                raise RunError(
                    f"{what}: it has had {MAX_VALUES + 1} values, and each needs a program of its own",
                    where=where or path,
                    remedy=f"keep it in a buffer, which a program reads and writes: self.register_buffer({name!r}, torch.tensor(...))",
                )
            if len(seen) == MAX_VALUES:
                log.warning(NEW_PROGRAM_EACH_VALUE, self.model, path, name)
            seen.append(value)


class _Snapshot:
    """One module's attributes at one moment: the plain values, the tensors, and the types of all."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state, self.names, self.types = state, [*state], [*map(type, state.values())]
        plain = tuple((name, value) for name, value in state.items() if type(value) in PLAIN_TYPES)
        tensors = tuple((name, TensorRef(value)) for name, value in state.items() if isinstance(value, torch.Tensor))
        self.found: tuple[tuple[str, object], ...] = plain + tensors
        self.keys, self.values = [name for name, _ in plain], [value for _, value in plain]
        self.tensors, self.refs = [name for name, _ in tensors], [held.ref for _, held in tensors]

    def unchanged(self) -> bool:
        """Whether names, types, plain values and tensors are still the same; values of other types do not count."""
        state = self.state
        same = [*map(state.get, self.keys)] == self.values and [*state] == self.names and [*map(type, state.values())] == self.types
        return same and (not self.tensors or all(map(is_, map(state.get, self.tensors), [ref() for ref in self.refs])))


def changed_attributes(before: Attributes, after: Attributes, fixed: Collection[Attribute] = ()) -> set[Attribute]:
    """The attributes that differ. A tensor replaced by one of the same kind counts only if it is ``fixed`` in a graph."""
    if before == after:
        return set()
    pairs = [(i, dict(a), dict(b)) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    found = [(i, name, a, b) for i, a, b in pairs for name in {*a, *b} if name not in a or name not in b or a[name] != b[name]]
    return {(i, name) for i, name, a, b in found if (i, name) in fixed or not _same_kind(a.get(name), b.get(name))}


def attributes_text(model: nn.Module, changed: Collection[Attribute], now: Attributes) -> str:
    """``, self.layers.0.scale=0.9``: the ``changed`` attributes of ``model`` and their values ``now``, for a log message."""
    names = [f"self.{name}." if name else "self." for name, _ in model.named_modules()]
    found = [(place, name, dict(now[place]).get(name, "gone")) for place, name in sorted(changed)]
    return "".join(f", {names[p]}{name}={'another tensor' if isinstance(v, TensorRef) else repr(v)}" for p, name, v in found)


def _same_kind(one: object, other: object) -> bool:
    return isinstance(one, TensorRef) and isinstance(other, TensorRef) and one.kind == other.kind
