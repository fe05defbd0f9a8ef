"""Attributes of modules that a forward changes, such as a counter or a cached tensor.

A graph computes tensors only. Tracing finds what a forward assigns to attributes (``side_effects`` in
``fxshard.passes.trace.python_state``), and the assignments are replayed on the modules after each run of the program. Tensors are
further outputs of the program; integers are expressions of their old values and of dynamic sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn

from fxshard._torch_compat.sizes.symbols import evaluated
from fxshard.graph.objects import Builder, ObjectState, Step, ValueSpec

Attribute = tuple[int, str]
"""(index of the module in ``model.modules()``, attribute name)."""


@dataclass(frozen=True)
class Number:
    """An integer that a call assigns. ``sizes``: its symbols that are dynamic sizes, by name; ``before``: its symbols that are
    attributes, as they were before the call."""

    expression: sympy.Basic
    sizes: tuple[tuple[str, sympy.Symbol], ...] = ()
    before: tuple[tuple[Attribute, sympy.Symbol], ...] = ()

    def value(self, states: Sequence[dict[str, Any]], sizes: Mapping[str, int]) -> Any:
        known = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.sizes}
        known |= {symbol: sympy.Integer(states[place][name]) for (place, name), symbol in self.before}
        return evaluated(self.expression, known)


@dataclass(frozen=True)
class Write:
    """One attribute that a call sets, or whose list or dict it changes. ``form``: "set" (to the only one of ``parts``), "append",
    "replace" (all items of a list) or "items" (of a dict, at ``keys``). ``path``: its name in the model; ``where``: the source line."""

    place: int
    name: str
    path: str
    where: str
    form: str
    parts: tuple[ValueSpec, ...]
    keys: tuple[Any, ...] = ()

    @property
    def attribute(self) -> Attribute:
        return self.place, self.name

    def apply(self, module: nn.Module, values: Sequence[Any]) -> None:
        if self.form == "set":
            setattr(module, self.name, values[0])
            return
        held = vars(module)[self.name]
        if self.form == "append":
            held.extend(values)
        elif self.form == "replace":
            held[:] = values
        else:
            held.update(zip(self.keys, values, strict=True))


@dataclass(frozen=True)
class SideEffects:
    """The attributes that a call changes.

    ``values``: the values in ``writes`` that a run computes, as indexed by their parts: an index among the further outputs, or a
    ``Number``. ``reads``: how to reach each further output once the forward has run. ``nodes``: lists and objects that the call creates.
    ``unread``: attributes that this or another call sets and that do not influence what the program computes. ``read``: those that do,
    each with its name in the model and the line that sets it.
    """

    writes: tuple[Write, ...] = ()
    nodes: tuple[ObjectState, ...] = ()
    values: tuple[int | Number, ...] = ()
    reads: tuple[tuple[int, tuple[Step, ...]], ...] = ()
    unread: frozenset[Attribute] = frozenset()
    read: tuple[tuple[Attribute, str, str], ...] = ()

    @property
    def counts(self) -> frozenset[Attribute]:
        """Attributes whose integers a run computes with."""
        return frozenset(attribute for value in self.values if isinstance(value, Number) for attribute, _ in value.before)

    def serves(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether all attributes in ``counts`` hold integers, and the lists and dicts to be changed exist."""
        return all(type(states[place].get(name)) is int for place, name in self.counts) and all(
            isinstance(states[w.place].get(w.name), dict if w.form == "items" else list) for w in self.writes if w.form != "set"
        )

    def apply(self, modules: Sequence[nn.Module], outputs: Sequence[Any], sizes: Mapping[str, int], device: torch.device) -> None:
        """Sets the attributes of ``modules`` after a run with the further outputs ``outputs``, at these dynamic ``sizes``."""
        states = [vars(module) for module in modules]
        values = [outputs[v] if isinstance(v, int) else v.value(states, sizes) for v in self.values]
        builder = Builder(self.nodes, values, device=device)
        for write in self.writes:
            write.apply(modules[write.place], [builder.value(part) for part in write.parts])
