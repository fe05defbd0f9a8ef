"""formulate: an annotated graph and its constraints -> a PlacementProblem of numbers.

Variables: one per node (which OpSpec), one per returned output (which layout), and one per further reader of a value.
- node cost: compute time of the spec (``cost.compute_time``)
- edge producer - reader: price of the cheapest redistribution (``redistribution.Table``)
- a value with several readers pays once for each layout that they read: beyond the first reader, reader i gets a
  variable whose states are (pay for layout l) or (share with reader j < i, which reads l too); with many readers instead
  a yes/no variable per layout, paid at the producer and required by the readers.
- a gradient is returned in its parameter's layout, a mutated buffer in the buffer's, a tangent comes in its output's.
- memory: a parameter's shard, and its gradient's, over one interval.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from torch import fx
from torch.distributed.tensor import Partial

from fxshard.call import Call
from fxshard.cost import compute_time, time_price
from fxshard.errors import ConstraintError
from fxshard.layout import Layout, ceil_shape
from fxshard.mesh import Mesh
from fxshard.passes.annotate import Annotated, input_layouts
from fxshard.passes.constrain import Constraints, Pin
from fxshard.planning_graph import PlanningGraph, operands, planned_nodes, producer, source_line
from fxshard.redistribution import Price, Table, bytes_price, table
from fxshard.sharding_plan import OpSpec
from fxshard.solver import PlacementProblem

Option = TypeVar("Option")
OBJECTIVES = ("time", "communication")
MANY_READERS = 4
"""Above this, sharing among readers takes a variable per layout instead of one per reader."""


@dataclass(frozen=True)
class Reader:
    """Something that reads a value: variable ``var`` reads it in ``layouts[state]``; ``node``/``operand`` say where in the graph."""

    var: int
    layouts: tuple[Layout, ...]
    node: str
    operand: int


@dataclass(frozen=True)
class Formulation:
    """The problem and what its variables mean.

    ``node_vars``: node -> (variable, specs); ``result_vars``: output index -> (variable, layouts).
    """

    problem: PlacementProblem
    node_vars: Mapping[str, tuple[int, tuple[OpSpec, ...]]]
    result_vars: Mapping[int, tuple[int, tuple[Layout, ...]]]
    readers: Mapping[str, tuple[Reader, ...]]
    price: Price
    unit: str
    start: tuple[int, ...] = ()
    """A legal choice to begin with: replicated wherever nothing else is asked for."""


def formulate(annotated: Annotated, constraints: Constraints, objective: str = "time") -> Formulation:
    """Builds the problem; raises ConstraintError when a pin leaves a node no spec."""
    builder = _Builder(annotated, constraints, time_price(annotated.mesh) if objective == "time" else bytes_price, objective)
    return builder.build()


@dataclass
class _Builder:
    annotated: Annotated
    constraints: Constraints
    price: Price
    objective: str
    costs: list[np.ndarray] = field(default_factory=list)
    usages: list[np.ndarray | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_costs: list[np.ndarray] = field(default_factory=list)
    start: list[int] = field(default_factory=list)

    @property
    def graph(self) -> PlanningGraph:
        return self.annotated.graph

    @property
    def mesh(self) -> Mesh:
        return self.annotated.mesh

    def build(self) -> Formulation:
        self.node_vars: dict[str, tuple[int, tuple[OpSpec, ...]]] = {}
        self.result_vars: dict[int, tuple[int, tuple[Layout, ...]]] = {}
        graded = {o.name for o in self.graph.outputs if o.kind == "gradient"}
        parameters = {i.node: i.name in graded for i in self.graph.inputs if i.kind == "parameter"}
        for node in planned_nodes(self.graph):
            if node.op != "output":
                self._node(node, parameters)
        self._results()
        self._start_tangents()
        readers = self._readers()
        for name, found in readers.items():
            self._value(self.graph.by_name[name], found)
        self._tangents()
        limit = self.constraints.memory_limit
        intervals = tuple(None if u is None else (0, 1) for u in self.usages)
        problem = PlacementProblem(
            tuple(self.costs),
            tuple(self.edges),
            tuple(self.edge_costs),
            tuple(self.usages) if limit is not None else (),
            intervals if limit is not None else (),
            limit,
            tuple(self.names),
        )
        unit = "microseconds" if self.objective == "time" else "bytes"
        return Formulation(problem, self.node_vars, self.result_vars, readers, self.price, unit, tuple(self.start))

    def _variable(self, name: str, costs: np.ndarray, usage: np.ndarray | None = None, start: int = 0) -> int:
        self.start.append(start)
        self.costs.append(costs)
        self.usages.append(usage)
        self.names.append(name)
        return len(self.costs) - 1

    def _edge(self, i: int, j: int, costs: np.ndarray) -> None:
        self.edges.append((i, j))
        self.edge_costs.append(costs)

    def _node(self, node: fx.Node, parameters: Mapping[str, bool]) -> None:
        specs = self._admitted(node)
        call = self.annotated.calls.get(node.name)
        if call is None or self.objective == "communication":
            costs = np.zeros(len(specs))
        else:
            costs = np.array(_compute_times(call, specs, self.mesh))
        usage = None
        if node.name in parameters:
            usage = np.array([parameter_bytes(node, s.outputs[0], self.mesh, parameters[node.name]) for s in specs], dtype=np.float64)
        self.node_vars[node.name] = (self._variable(node.name, costs, usage), specs)

    def _admitted(self, node: fx.Node) -> tuple[OpSpec, ...]:
        """The node's specs that its pins and the plan admit; where none has an empty shard on a rank, those with one are left out."""
        specs = self.annotated.specs[node.name]
        pins = _pins(node, self.constraints)
        wishes = [(pin.said, _gives(pin, output)) for pin, output in pins]
        want = self.constraints.specs.get(node.name)
        if not wishes and want is None:
            return self.annotated.full[node.name]
        for pin, output in pins:
            if not any(pin.admits(s.outputs[output]) for s in specs):
                raise ConstraintError(
                    f"{pin.said} cannot hold: {node.name} ({_op(node)}) never gives that layout",
                    where=place(node, self.graph),
                    remedy=f"it can give {', '.join(sorted({str(s.outputs[output]) for s in specs})[:12])}",
                )
        if want is not None:
            if not any(_is_spec(want, s) for s in specs):
                raise ConstraintError(
                    f"the plan gives {node.name} ({_op(node)}) the spec {want}, which is not legal",
                    where=place(node, self.graph),
                    remedy=f"legal ones are {'; '.join(str(s) for s in specs[:6])}",
                )
            wishes.append((planned_spec(node.name, want), partial(_is_spec, want)))
        kept = _all_hold(specs, wishes, place(node, self.graph))
        if want is not None:
            return kept
        full = set(self.annotated.full[node.name])
        return tuple(s for s in kept if s in full) or kept

    def _results(self) -> None:
        """One variable per returned output: replicated or sharded, or as pinned."""
        returned = operands(self.graph.module.graph.output_node())
        whole = self.constraints.specs.get("output")
        for index, (end, node) in enumerate(zip(self.graph.outputs, returned, strict=True)):
            if end.kind != "output":
                continue
            layouts = result_layouts(node, self.mesh)
            wishes = [(pin.said, pin.admits) for pin in self.constraints.results.get(index, ())]
            if whole is not None:
                said = planned_spec(f"output {end.name}", whole.inputs[index])
                wishes.append((said, Pin(whole.inputs[index], said).admits))
            for said, holds in wishes:
                if not any(map(holds, layouts)):
                    remedy = "outputs can be replicated or sharded where they are longer than 1, not partial"
                    raise ConstraintError(f"{said} cannot hold for {end.name}", where=place(node, self.graph), remedy=remedy)
            kept = _all_hold(layouts, wishes, place(node, self.graph))
            self.result_vars[index] = (self._variable(end.name, np.zeros(len(kept))), kept)

    def _readers(self) -> dict[str, tuple[Reader, ...]]:
        found: dict[str, list[Reader]] = {}
        for node in planned_nodes(self.graph):
            if node.op == "output":
                for index, operand in enumerate(operands(node)):
                    found.setdefault(operand.name, []).append(self._returned(index))
            elif node.op == "call_function":
                var, specs = self.node_vars[node.name]
                for k, operand in enumerate(operands(node)):
                    found.setdefault(operand.name, []).append(Reader(var, tuple(s.inputs[k] for s in specs), node.name, k))
        return {name: tuple(readers) for name, readers in found.items()}

    def _returned(self, index: int) -> Reader:
        """An output is read in its own variable's layout; a gradient or mutated buffer in that of its input."""
        end = self.graph.outputs[index]
        if end.kind == "output":
            var, layouts = self.result_vars[index]
            return Reader(var, layouts, "output", index)
        kinds = ("parameter", "buffer", "input")
        node = next(i.node for i in self.graph.inputs if i.name == end.name and i.kind in kinds)
        var, specs = self.node_vars[node]
        return Reader(var, tuple(s.outputs[0] for s in specs), "output", index)

    def _value(self, node: fx.Node, readers: tuple[Reader, ...]) -> None:
        source, index = producer(node)
        var, specs = self.node_vars[source.name]
        have = tuple(s.outputs[index] for s in specs)
        paths = self._table(node, have, readers)
        if len(readers) > MANY_READERS:
            self._shared_by_layout(node, var, have, readers, paths)
            return
        first, *others = readers
        self._edge(var, first.var, _prices(paths, have, first.layouts))
        for i, reader in enumerate(others, 1):
            self._shared_by_reader(node, var, have, reader, readers[:i], paths)

    def _table(self, node: fx.Node, have: Sequence[Layout], readers: Sequence[Reader]) -> Table:
        value = node.meta["val"]
        layouts = {*have, *(layout for r in readers for layout in r.layouts)}
        ops = tuple(sorted({"sum", *(p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial))}))
        return table(tuple(value.shape), value.dtype.itemsize, self.mesh, ops, self.price)

    def _shared_by_reader(
        self, node: fx.Node, var: int, have: tuple[Layout, ...], reader: Reader, earlier: tuple[Reader, ...], paths: Table
    ) -> None:
        """Variable "how this reader gets the value": pay for layout l, or share with an earlier reader of l."""
        own = tuple(dict.fromkeys(reader.layouts))
        shared = [(j, layout) for j, e in enumerate(earlier) for layout in own if layout in set(e.layouts)]
        if not shared:
            self._edge(var, reader.var, _prices(paths, have, reader.layouts))
            return
        ways = [(-1, layout) for layout in own] + shared
        now = reader.layouts[self.start[reader.var]]
        same = [j for j, e in enumerate(earlier) if e.layouts[self.start[e.var]] == now]
        how = self._variable(f"{node.name} for {reader.node}", np.zeros(len(ways)), start=ways.index((same[0] if same else -1, now)))
        paid = np.zeros((len(have), len(ways)))
        paid[:, : len(own)] = _prices(paths, have, own)
        self._edge(var, how, paid)
        self._edge(how, reader.var, _agree([layout for _, layout in ways], reader.layouts))
        for j, other in enumerate(earlier):
            wanted = [layout if i == j else None for i, layout in ways]
            if any(w is not None for w in wanted):
                self._edge(how, other.var, _agree(wanted, other.layouts))

    def _shared_by_layout(self, node: fx.Node, var: int, have: tuple[Layout, ...], readers: tuple[Reader, ...], paths: Table) -> None:
        """Variables "is the value there in layout l": paid at the producer, required by each reader of l."""
        for layout in dict.fromkeys(layout for r in readers for layout in r.layouts):
            used = any(r.layouts[self.start[r.var]] == layout for r in readers)
            there = self._variable(f"{node.name} in {layout}", np.zeros(2), start=int(used))
            paid = np.zeros((len(have), 2))
            paid[:, 1:] = _prices(paths, have, (layout,))
            self._edge(var, there, paid)
            for reader in readers:
                needs = np.array([x == layout for x in reader.layouts])
                if needs.any():
                    costs = np.zeros((2, len(needs)))
                    costs[0, needs] = np.inf
                    self._edge(there, reader.var, costs)

    def _tangents(self) -> None:
        """A tangent comes in the layout of the output that it belongs to."""
        for result, layouts, var, specs in self._tangent_pairs():
            self._edge(result, var, _agree(layouts, tuple(s.outputs[0] for s in specs)))

    def _start_tangents(self) -> None:
        """The start agrees on them where the pins let it."""
        for result, layouts, var, specs in self._tangent_pairs():
            both = [(a, b) for a, layout in enumerate(layouts) for b, s in enumerate(specs) if s.outputs[0] == layout]
            if both:
                self.start[result], self.start[var] = both[0]

    def _tangent_pairs(self) -> list[tuple[int, tuple[Layout, ...], int, tuple[OpSpec, ...]]]:
        by_name = {o.tangent: i for i, o in enumerate(self.graph.outputs)}
        return [(*self.result_vars[by_name[end.name]], *self.node_vars[end.node]) for end in self.graph.inputs_of("tangent")]


@lru_cache(maxsize=8192)
def _compute_times(call: Call, specs: tuple[OpSpec, ...], mesh: Mesh) -> tuple[float, ...]:
    return tuple(compute_time(call, s, mesh) for s in specs)


def _prices(paths: Table, have: Sequence[Layout], want: Sequence[Layout]) -> np.ndarray:
    """(len(have), len(want)) prices of the cheapest paths."""
    return paths.prices[np.ix_([paths.index[h] for h in have], [paths.index[w] for w in want])]


def _agree(left: Sequence[Layout | None], right: Sequence[Layout]) -> np.ndarray:
    """0 where two layouts are equal (None: with any), inf elsewhere."""
    numbers: dict[Any, int] = {}
    a = np.array([-1 if x is None else numbers.setdefault(x, len(numbers)) for x in left])
    b = np.array([numbers.setdefault(x, len(numbers)) for x in right])
    return np.where((a[:, None] == b[None, :]) | (a[:, None] == -1), 0.0, np.inf)


def _all_hold(options: Sequence[Option], wishes: Sequence[tuple[str, Callable[[Option], bool]]], where: str | None) -> tuple[Option, ...]:
    """The options that fulfil all wishes (what the user said, whether an option fulfils it).

    Raises ConstraintError naming the fewest wishes that exclude each other.
    """
    kept = tuple(o for o in options if all(holds(o) for _, holds in wishes))
    if kept:
        return kept
    sets = itertools.chain.from_iterable(itertools.combinations(wishes, n) for n in range(1, len(wishes) + 1))
    fewest = next(some for some in sets if not any(all(holds(o) for _, holds in some) for o in options))
    raise contradictory([said for said, _ in fewest], where)


def contradictory(said: Sequence[str], where: str | None) -> ConstraintError:
    """The error for what the user said that cannot hold together."""
    names = "; ".join(dict.fromkeys(said))
    return ConstraintError(f"these constraints cannot hold together: {names}", where=where, remedy="remove or change one of them")


def planned_spec(name: str, spec: object) -> str:
    """How a constraint that a plan makes is called."""
    return f"{name}: {spec} of the plan given as pins"


def _gives(pin: Pin, output: int) -> Callable[[OpSpec], bool]:
    return lambda spec: pin.admits(spec.outputs[output])


def _is_spec(want: OpSpec, spec: OpSpec) -> bool:
    return spec.outputs == want.outputs and (not want.inputs or spec.inputs == want.inputs)


def place(node: fx.Node, graph: PlanningGraph) -> str:
    """The user's line behind a node, the user's name of an input."""
    return source_line(node) or next((f"{i.kind} {i.name}" for i in graph.inputs if i.node == node.name), f"node {node.name}")


def _pins(node: fx.Node, constraints: Constraints) -> list[tuple[Pin, int]]:
    """(pin, output index) on the node or on its getitems."""
    pins = [(pin, 0) for pin in constraints.values.get(node.name, ())]
    for user in node.users:
        if producer(user)[0] is node and user is not node:
            pins += [(pin, producer(user)[1]) for pin in constraints.values.get(user.name, ())]
    return pins


def result_layouts(node: fx.Node, mesh: Mesh) -> list[Layout]:
    """Layouts in which an output may be returned."""
    return input_layouts(node, mesh)


def parameter_bytes(node: fx.Node, layout: Layout, mesh: Mesh, with_gradient: bool) -> int:
    """Bytes of a parameter's largest shard, twice where it has a gradient."""
    value = node.meta["val"]
    count = int(np.prod(ceil_shape(tuple(value.shape), layout, mesh.shape), dtype=np.int64))
    return count * value.dtype.itemsize * (2 if with_gradient else 1)


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op
