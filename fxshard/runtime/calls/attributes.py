"""What a model's forward may read besides tensors of its own: numbers, texts and switches that its modules hold, and tensors that are no
buffers. A graph has them fixed."""

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
PLAIN = (bool, int, float, str, type(None))
Attributes = tuple[tuple[tuple[str, object], ...], ...]
"""For each module its plain attributes, ``training`` among them, and tensors as ``Held``, by name."""


TRACED_EACH = (
    "the forward of %s reads its attribute %s, which is another at each call: each value takes a program of its own; keep it in a buffer, "
    "self.register_buffer(%r, torch.tensor(...)), and change that by fill_()"
)
MOST = 8
"""So many values of an attribute that the forward itself sets have programs of their own."""


class Held:
    """A tensor among the attributes, equal to itself alone, which this does not keep alive."""

    def __init__(self, value: torch.Tensor) -> None:
        self.ref, self.kind = weakref.ref(value), (value.shape, value.dtype, value.device)

    def __eq__(self, other: object) -> bool:
        mine = self.ref()
        return self is other or (isinstance(other, Held) and mine is not None and mine is other.ref())

    def __hash__(self) -> int:
        return id(self)


class AttributeReader:
    """Reads the attributes of a model's modules on each call; makes them anew only where something changed."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = [_Seen(vars(module)) for module in model.modules()]
        self.last: Attributes = tuple(seen.found for seen in self.seen)

    def now(self) -> Attributes:
        """As they are now; the same object as before where they are the same, module by module."""
        if not all(map(_Seen.unchanged, self.seen)):
            self.seen = [seen if seen.unchanged() else _Seen(seen.state) for seen in self.seen]
            self.last = tuple(seen.found for seen in self.seen)
        return self.last


class KeptAttributes:
    """The attributes that calls of a model set (``written``), those that were others at a later call (``changed``), and the values of those
    that its programs take for granted."""

    def __init__(self, model: str) -> None:
        self.model, self.written, self.changed = model, frozenset[Attribute](), frozenset[Attribute]()
        self.values: dict[Attribute, list[object]] = {}

    def copied(self) -> KeptAttributes:
        """For a copy of the model."""
        new = copy.copy(self)
        new.values = {attribute: [*values] for attribute, values in self.values.items()}
        return new

    def note(self, graph: PlanningGraph, now: Attributes, plan: ShardingPlan | None = None) -> None:
        """Of a call that was traced with the attributes as they are ``now``; raises RunError where one is another again and again, and
        PlanError for a ``plan`` that does not return the tensors that the forward leaves there."""
        effects = graph.side_effects
        if effects is None:
            return
        if plan is not None and plan.graph_hash != graph.hash and effects.reads:
            paths = ", ".join(write.path for write in effects.writes)
            what = f"the plan does not return what the forward of {self.model} leaves in attributes ({paths})"
            raise PlanError(what, remedy="let parallelize plan, or return those tensors from the forward instead")
        self.written |= {write.attribute for write in effects.writes}
        for (place, name), path, where in effects.read:
            seen, value = self.values.setdefault((place, name), []), dict(now[place]).get(name)
            if value in seen or (isinstance(value, Held) and (place, name) not in graph.fixed):
                continue
            if len(seen) == MOST and (place, name) in self.written:
                what = f"the forward of {self.model} sets its attribute {path} and computes with what it was before"
                raise RunError(
                    f"{what}: there have been {MOST + 1} values of it, and each takes a program of its own",
                    where=where or path,
                    remedy=f"keep it in a buffer, which a program reads and writes: self.register_buffer({name!r}, torch.tensor(...))",
                )
            if len(seen) == MOST:
                log.warning(TRACED_EACH, self.model, path, name)
            seen.append(value)


class _Seen:
    """One module's attributes as they were: the plain ones, the tensors, and the types of all."""

    def __init__(self, state: dict[str, object]) -> None:
        self.state, self.names, self.types = state, [*state], [*map(type, state.values())]
        plain = tuple((name, value) for name, value in state.items() if type(value) in PLAIN)
        tensors = tuple((name, Held(value)) for name, value in state.items() if isinstance(value, torch.Tensor))
        self.found: tuple[tuple[str, object], ...] = plain + tensors
        self.keys, self.values = [name for name, _ in plain], [value for _, value in plain]
        self.tensors, self.refs = [name for name, _ in tensors], [held.ref for _, held in tensors]

    def unchanged(self) -> bool:
        """Whether names, types, plain values and tensors are the same; of others the value does not matter."""
        state = self.state
        same = [*map(state.get, self.keys)] == self.values and [*state] == self.names and [*map(type, state.values())] == self.types
        return same and (not self.tensors or all(map(is_, map(state.get, self.tensors), [ref() for ref in self.refs])))


def differing(before: Attributes, after: Attributes, fixed: Collection[Attribute] = ()) -> set[Attribute]:
    """The attributes that are not the same; of tensors of one shape and dtype only those ``fixed`` in a graph."""
    if before == after:
        return set()
    pairs = [(i, dict(a), dict(b)) for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    found = [(i, name, a, b) for i, a, b in pairs for name in {*a, *b} if name not in a or name not in b or a[name] != b[name]]
    return {(i, name) for i, name, a, b in found if (i, name) in fixed or not _of_a_kind(a.get(name), b.get(name))}


def attributes_text(model: nn.Module, changed: Collection[Attribute], now: Attributes) -> str:
    """``, self.layers.0.scale=0.9``: attributes of ``model`` and what they are ``now``; of tensors that they are others."""
    names = [f"self.{name}." if name else "self." for name, _ in model.named_modules()]
    found = [(place, name, dict(now[place]).get(name, "gone")) for place, name in sorted(changed)]
    return "".join(f", {names[p]}{name}={'another tensor' if isinstance(v, Held) else repr(v)}" for p, name, v in found)


def _of_a_kind(one: object, other: object) -> bool:
    return isinstance(one, Held) and isinstance(other, Held) and one.kind == other.kind
