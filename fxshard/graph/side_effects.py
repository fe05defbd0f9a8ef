"""What a call leaves in attributes of a model's modules: numbers that it counts, tensors that it remembers.

A graph computes tensors only. What a forward assigns to attributes is found when it is traced (``side_effects`` in
``fxshard.passes.trace.python_state``), and done for the module after each run of the program: tensors are outputs of it, whole numbers
are expressions of what was there before and of sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn

from fxshard._torch_compat.symbols import evaluated
from fxshard.graph.objects import Builder, Node, Part, Step

Attribute = tuple[int, str]
"""(place of the module among ``model.modules()``, name)."""


@dataclass(frozen=True)
class Number:
    """A number that a call leaves. ``sizes``, ``before``: by name what its symbols are, dynamic sizes or attributes as they were before."""

    expression: sympy.Basic
    sizes: tuple[tuple[str, sympy.Symbol], ...] = ()
    before: tuple[tuple[Attribute, sympy.Symbol], ...] = ()

    def value(self, states: Sequence[dict[str, Any]], sizes: Mapping[str, int]) -> Any:
        known = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.sizes}
        known |= {symbol: sympy.Integer(states[place][name]) for (place, name), symbol in self.before}
        return evaluated(self.expression, known)


@dataclass(frozen=True)
class Write:
    """One attribute that a call sets, or a list or dict in it that it changes: ``form`` is "set" (to the one of ``parts``), "append",
    "replace" (all of a list's items) or "items" (of a dict, at ``keys``). ``path``: its name in the model; ``where``: the line."""

    place: int
    name: str
    path: str
    where: str
    form: str
    parts: tuple[Part, ...]
    keys: tuple[Any, ...] = ()

    @property
    def attribute(self) -> Attribute:
        return self.place, self.name

    def do(self, module: nn.Module, values: Sequence[Any]) -> None:
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
    """What a call leaves in attributes.

    ``values``: the values among ``writes`` that a run makes, by the numbers in their parts: places among the further outputs, or numbers.
    ``reads``: how each further output is reached once the forward has run. ``nodes``: lists and objects that are made anew.
    ``unread``: attributes that this or another call sets, and on whose value nothing that the program computes depends. ``read``: those
    on which it does, and where the forward sets them.
    """

    writes: tuple[Write, ...] = ()
    nodes: tuple[Node, ...] = ()
    values: tuple[int | Number, ...] = ()
    reads: tuple[tuple[int, tuple[Step, ...]], ...] = ()
    unread: frozenset[Attribute] = frozenset()
    read: tuple[tuple[Attribute, str, str], ...] = ()

    @property
    def counts(self) -> frozenset[Attribute]:
        """Attributes whose whole numbers a run computes with."""
        return frozenset(attribute for value in self.values if isinstance(value, Number) for attribute, _ in value.before)

    def serves(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether what it counts are whole numbers, and lists and dicts that it changes are there."""
        return all(type(states[place].get(name)) is int for place, name in self.counts) and all(
            isinstance(states[w.place].get(w.name), dict if w.form == "items" else list) for w in self.writes if w.form != "set"
        )

    def settle(self, modules: Sequence[nn.Module], outputs: Sequence[Any], sizes: Mapping[str, int], device: torch.device) -> None:
        """Sets the attributes of ``modules`` after a run whose further outputs are ``outputs``, at these dynamic sizes."""
        states = [vars(module) for module in modules]
        values = [outputs[v] if isinstance(v, int) else v.value(states, sizes) for v in self.values]
        builder = Builder(self.nodes, values, device=device)
        for write in self.writes:
            write.do(modules[write.place], [builder.value(part) for part in write.parts])
