"""ShardedProgram: the planned graph lowered for a mesh, with its collectives, plan and weights' layouts; one for all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import RLock
from typing import Any

import sympy
import torch
from torch import fx

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated, expression, hint_of, oblivious, symbolic_number
from fxshard.graph.planning_graph import GraphInput, GraphOutput
from fxshard.layout.layouts import Layout, symbolic_coordinate
from fxshard.mesh.mesh import Mesh
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.shapes import Guard, Ranged, first_broken, guards_of, guards_on, instantiated
from fxshard.size_words import served_text
from fxshard.timeline import PassEffect

c10d = torch.ops._c10d_functional
SHIFT, ZIGZAG = torch.ops.fxshard.shift.default, torch.ops.fxshard.zigzag.default
DISPATCH, COMBINE = torch.ops.fxshard.dispatch.default, torch.ops.fxshard.combine.default
KINDS = {
    c10d.all_reduce.default: "all_reduce",
    c10d.all_gather_into_tensor.default: "all_gather",
    c10d.reduce_scatter_tensor.default: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
    SHIFT: "shift",
    ZIGZAG: "zigzag",
    DISPATCH: "dispatch",
    COMBINE: "combine",
}
"""The collective operators of a local graph, and the names of their kinds."""
ROOM = 4
"""Of the arguments of collectives of experts' rows: how many times the expected rows have room in the buffer."""
_COLLECTIVES = frozenset(map(id, KINDS))

SizeClass = tuple[tuple[int, ...], ...]
"""For each uneven cut of a dim in the plan, the local sizes after each axis of the cut; ranks with equal ones share a graph."""


@dataclass(frozen=True)
class ProgramCollective:
    """A collective as issued (``shape`` and ``dtype`` of its input buffer). ``serves``: the (entry, step) pairs of the plan's
    collectives that it executes: several if collectives were merged; the pieces of a chunked one share a pair."""

    kind: str
    axis: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    node: str
    serves: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ProgramSize(Ranged):
    """A dynamic size of a program: the size of the dims at ``places`` (path of an input, dim), ``unit`` times the symbol ``value``.

    ``least``, ``most``: the user's range; ``uneven``: whether shards may have unequal lengths.
    """

    name: str
    places: tuple[tuple[str, int], ...]
    unit: int
    value: torch.SymInt = field(compare=False)
    least: int = 1
    most: int | None = None
    uneven: bool = False

    @property
    def example(self) -> int:
        """The size at which the plan was made, rounded up to the unit; costs, bytes and collectives refer to it."""
        return int(hint_of(self.value)) * self.unit

    @property
    def served(self) -> str:
        """Range and unit in words."""
        return served_text(self.least, self.most, self.unit)


_READING = RLock()
"""Held while a stored program's graphs are read, once, whichever thread asks first. One for all, since a lock cannot be copied."""


class StoredModules(Mapping[SizeClass, fx.GraphModule]):
    """The local graphs of a program that was read from a file; ``read`` makes them when the first of them is asked for. ``hash``: that of
    the program, which ``read`` checks."""

    def __init__(self, classes: Iterable[SizeClass], hash: str, read: Callable[[], Mapping[SizeClass, fx.GraphModule]]) -> None:
        self.classes, self.hash = tuple(classes), hash
        self._read: Callable[[], Mapping[SizeClass, fx.GraphModule]] | None = read
        self._found: Mapping[SizeClass, fx.GraphModule] = {}

    @property
    def found(self) -> Mapping[SizeClass, fx.GraphModule]:
        with _READING:
            if self._read is not None:
                self._found = self._read()
                self._read = None  # with the file's bytes
        return self._found

    def __getitem__(self, size_class: SizeClass) -> fx.GraphModule:
        return self.found[size_class]

    def __iter__(self) -> Iterator[SizeClass]:
        return iter(self.classes)

    def __len__(self) -> int:
        return len(self.classes)


@dataclass(frozen=True)
class ShardedProgram:
    """A lowered program.

    ``modules``: one local graph per size class (a single one if shards are even); placeholders are in the order of ``inputs``, results in
    the order of ``outputs``. Collectives name their axis as group; ``fxshard.axis_index`` is the rank's coordinate. ``input_layouts``,
    ``output_layouts``, ``input_shapes`` and ``output_shapes`` give layouts and global shapes.
    """

    mesh: Mesh
    plan: ShardingPlan
    modules: Mapping[SizeClass, fx.GraphModule]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    collectives: tuple[ProgramCollective, ...]
    classes: Mapping[tuple[int, ...], SizeClass]
    """Coordinate of each rank -> its size class."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments, by path, that were not tensors when the model was traced; each call must pass the same."""
    effects: tuple[PassEffect, ...] = ()
    """The effect of each pass after lowering; not stored in a program's file."""
    sizes: tuple[ProgramSize, ...] = ()
    """Dynamic sizes: shapes, arguments and values are expressions in their symbols; ``collectives`` refers to the example."""
    guards: tuple[Guard, ...] = ()
    """Conditions on them that the program assumes."""
    ranks: tuple[ProgramSize, ...] = ()
    """Symbols of the rank's coordinate on each axis, counted from 1, if lengths of shards depend on it. A local graph then serves all ranks
    of its class; ``local`` inserts the numbers."""

    def refuses(self, sizes: Mapping[str, int]) -> str | None:
        """Why the program cannot run at these sizes, by name; None if it can."""
        for one in self.sizes:
            if not one.allows(sizes[one.name]):
                return f"{one.name} is {sizes[one.name]}, it must be {one.span}"
            if sizes[one.name] % one.unit:
                return f"{one.name} is {sizes[one.name]}, shards are even at multiples of {one.unit} only"
        guard = first_broken(self.guards, sizes)
        return None if guard is None else f"the model or its lowering takes for granted that {guard}"

    def values(self, sizes: Mapping[str, int]) -> dict[sympy.Symbol, sympy.Integer]:
        """The values of its symbols at these sizes."""
        return {expression(one.value): sympy.Integer(sizes[one.name] // one.unit) for one in self.sizes}

    @property
    def memory_values(self) -> dict[sympy.Symbol, sympy.Integer]:
        """The values of its symbols at the sizes that the plan's memory refers to, else in the example; empty without symbols."""
        sizes = {one.name: self.plan.memory_sizes.get(one.name, one.unit * hint_of(one.value)) for one in self.sizes}
        found = {expression(one.value): sympy.Integer(-(-sizes[one.name] // one.unit)) for one in self.sizes}
        return {**found, **self.coordinate_values(self.origin)}

    @property
    def origin(self) -> tuple[int, ...]:
        """Coordinate of the first rank, on whose graph passes decide for all."""
        return (0,) * self.mesh.ndim

    @property
    def first(self) -> fx.GraphModule:
        """The graph of the first rank's class."""
        return self.modules[self.classes[self.origin]]

    def coordinate_values(self, coordinate: tuple[int, ...]) -> dict[sympy.Symbol, sympy.Integer]:
        """The values of the symbols in ``ranks`` for the rank at ``coordinate``."""
        return {expression(one.value): sympy.Integer(index + 1) for one, index in zip(self.ranks, coordinate, strict=False)}

    def indexes(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """``coordinate`` as it occurs in local graphs: symbolic if there are symbols in ``ranks``."""
        return symbolic_coordinate(coordinate, [one.value for one in self.ranks]) if self.ranks else coordinate

    def local(self, coordinate: tuple[int, ...]) -> fx.GraphModule:
        """The graph of the rank at ``coordinate``: that of its class with its own coordinate inserted."""
        module = self.modules[self.classes[coordinate]]
        if not self.ranks:
            return module
        env, values = self.ranks[0].value.node.shape_env, self.coordinate_values(coordinate)
        example = {expression(one.value): sympy.Integer(hint_of(one.value)) for one in self.sizes}

        def make(expr: sympy.Basic, _: Any) -> Any:
            own = expr.xreplace(values)
            return symbolic_number(env, own, evaluated(own, example))

        with oblivious():
            return instantiated(module, values, make, FakeTensorMode(allow_non_fake_inputs=True, shape_env=env))

    def noted_guards(self) -> tuple[Guard, ...]:
        """The guards on its symbols that have been noted so far, on any rank."""
        return guards_of(*self._symbols)

    def guards_on(self, condition: Any, where: str) -> tuple[Guard, ...]:
        """Guards for a condition on its symbols that ``where`` assumes on all ranks."""
        return guards_on(condition, where, *self._symbols)

    @property
    def _symbols(self) -> tuple[dict[str, torch.SymInt], dict[str, int], dict[str, tuple[torch.SymInt, int]]]:
        """(sizes, the unit of each, coordinate symbols with the number of ranks)."""
        symbols, units = {one.name: one.value for one in self.sizes}, {one.name: one.unit for one in self.sizes}
        return symbols, units, {one.name: (one.value, one.most or 1) for one in self.ranks}

    def with_modules(self, modules: Mapping[SizeClass, fx.GraphModule], collectives: Iterable[ProgramCollective]) -> ShardedProgram:
        """The same program with other local graphs and their collectives."""
        return replace(self, modules=modules, collectives=tuple(collectives))

    @cached_property
    def cache(self) -> dict[str, Any]:
        """A cache of values derived from the local graphs, by name; a program with other graphs has its own."""
        return {}

    def after_pass(self, effect: PassEffect, guards: tuple[Guard, ...]) -> ShardedProgram:
        """The same program with a pass's effect recorded; the cache is kept."""
        same = replace(self, effects=(*self.effects, effect), guards=guards)
        same.cache.update(self.cache)
        return same

    @property
    def train(self) -> bool:
        return self.plan.train

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the plan and of the local graphs with all their arguments; ranks compare it."""
        if isinstance(self.modules, StoredModules):
            return self.modules.hash
        graphs = [[list(key), [n.format_node() for n in module.graph.nodes]] for key, module in self.modules.items()]
        return hashlib.sha256((self.plan.hash + json.dumps(graphs)).encode()).hexdigest()

    def __str__(self) -> str:
        from fxshard.plans.plan_text import view_of
        from fxshard.program.fields import program_fields
        from fxshard.views.screen import screen

        return screen(view_of(self.plan), program_fields(self))

    def _repr_html_(self) -> str:
        from fxshard.plans.plan_text import view_of
        from fxshard.program.fields import program_fields
        from fxshard.views.notebook import plan_html

        return plan_html(view_of(self.plan), program_fields(self))


def coordinate_symbols(mesh: Mesh, env: SymbolEnv) -> tuple[ProgramSize, ...]:
    """The symbols of a rank's coordinate on each axis, counted from 1; in the example, the first rank's."""
    axes = zip(mesh.axis_names, mesh.shape, strict=True)
    return tuple(ProgramSize(f"rank_on_{name}", (), 1, env.symbol(f"rank on {name}", 1, 1, size), 1, size) for name, size in axes)


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` of a local graph starts a collective (a wait does not)."""
    return id(node.target) in _COLLECTIVES


def is_wait(node: fx.Node) -> bool:
    return node.target is c10d.wait_tensor.default
