"""formulate: an annotated graph and its constraints -> a PlacementProblem of numbers.

Variables: one per node (which OpSpec) and one per returned output (which layout).
- node cost: compute time of the spec (``cost.compute_time``)
- transfer from a producer to all readers of a value: price of the cheapest redistribution (``redistribution.Table``), once
  for each layout that they read.
- parts of one operator (``groups``): one variable for all, with what is reduced between them.
- a gradient is returned in its parameter's layout, a mutated buffer in the buffer's, a tangent comes in its output's.
- what the user wants equal: an edge from each to the first; what may be sent on an axis: a row (``budgets``).
- memory, where it is limited: what values take, and the layouts that they are brought into, while they live (``lifetimes``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
from torch import fx
from torch.distributed.tensor import Partial

from fxshard.call import Call
from fxshard.cost import compute_time, time_price
from fxshard.errors import ConstraintError
from fxshard.layout import Layout
from fxshard.mesh import Mesh
from fxshard.passes.alike import Alike
from fxshard.passes.annotate import Annotated, input_layouts
from fxshard.passes.budgets import Moved, rows
from fxshard.passes.constrain import Condition, Constraints
from fxshard.passes.groups import Group, groups, handed_over, joint_specs
from fxshard.passes.lifetimes import Lifetimes, parameter_state, shard_bytes
from fxshard.passes.names import Place
from fxshard.planning_graph import PlanningGraph, operands, outputs_of, plain_shape, planned_nodes, producer, source_line
from fxshard.redistribution import Price, Table, bytes_price, path_price, table
from fxshard.sharding_plan import OpSpec
from fxshard.solver import Live, PlacementProblem, Row, Transfer

Option = TypeVar("Option")
OBJECTIVES = ("time", "communication")


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
    names: list[str] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    edge_costs: list[np.ndarray] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    alike: Alike = field(default_factory=Alike)
    brought: dict[str, tuple[int, list[tuple[Layout, ...]]]] = field(default_factory=dict)
    """Value -> (index of its transfer, the layouts at its ends)."""
    joined: list[tuple[int, Group]] = field(default_factory=list)
    """(variable, the group that it decides)."""

    @property
    def graph(self) -> PlanningGraph:
        return self.annotated.graph

    @property
    def mesh(self) -> Mesh:
        return self.annotated.mesh

    def build(self) -> Formulation:
        self.node_vars: dict[str, tuple[int, tuple[OpSpec, ...]]] = {}
        self.result_vars: dict[int, tuple[int, tuple[Layout, ...]]] = {}
        together = {n: g for g in groups(self.graph, self._free) if self._joint(g)[0] for n in g.nodes}
        for node in planned_nodes(self.graph):
            if node in together and node.name not in self.node_vars:
                self._group(together[node])
            elif node.op != "output" and node.name not in self.node_vars:
                self._node(node)
        self._results()
        self._start_tangents()
        self._start_equal()
        readers = self._readers()
        for name, found in readers.items():
            self._value(self.graph.by_name[name], found)
        self._tangents()
        self._equalities()
        limit = self.constraints.memory_limit
        problem = PlacementProblem(
            tuple(self.costs),
            tuple(self.edges),
            tuple(self.edge_costs),
            usage_limit=limit,
            node_names=tuple(self.names),
            transfers=tuple(self.transfers),
            lives=() if limit is None else tuple(self._lives()),
            rows=self._budgets(),
        )
        unit = "microseconds" if self.objective == "time" else "bytes"
        return Formulation(problem, self.node_vars, self.result_vars, readers, self.price, unit, tuple(self.start))

    def _lives(self) -> Iterator[Live]:
        """What is in memory, and when: of nodes by what they give, of transfers by what values are brought into."""
        times = Lifetimes(self.graph)
        for value in times.values:
            source, index = producer(value)
            var, specs = self.node_vars[source.name]
            returned = times.only_returned(value) and source.op != "placeholder"
            transfer, ends = self.brought.get(value.name, (-1, []))
            if not times.is_view(source):
                state = parameter_state(value, self.constraints.optimizer) if value.name in times.trained else 1.0
                lo, hi = times.own(value)
                amounts = self._bytes(value, [self._layouts(specs, "outputs", index)])
                yield Live(lo, times.end if returned and not ends else hi, state * amounts, var)
            if ends:
                there, other = self.alike(("moved", *_kind(value)), ends, partial(self._moved_bytes, value, ends))
                lo, hi = times.moved(value, times.readers[value])
                yield Live(lo, lo + 1 if returned else hi, other, transfer=transfer)
                if returned:
                    yield Live(lo + 1, hi, there, transfer=transfer)
        yield from self._joined_lives(times)

    def _joined_lives(self, times: Lifetimes) -> Iterator[Live]:
        """What the members of a group hand over to each other in another layout, by the state of all."""
        for var, group in self.joined:
            options = [self.node_vars[n.name][1] for n in group.nodes]
            found: dict[tuple[int, int], np.ndarray] = {}
            for state, chosen in enumerate(zip(*options, strict=True)):
                for member, output, want in handed_over(group, chosen):
                    value = outputs_of(group.nodes[member])[output]
                    assert value is not None
                    amounts = found.setdefault((member, output), np.zeros(len(self.costs[var])))
                    amounts[state] += shard_bytes(plain_shape(value.shape), value.dtype.itemsize, want, self.mesh.shape)
            last = max(times.time[n] for n in group.nodes) + 1
            for (member, _), amounts in found.items():
                yield Live(times.time[group.nodes[member]], last, amounts, var)

    def _bytes(self, value: fx.Node, ends: Sequence[tuple[Layout, ...]]) -> np.ndarray:
        """Bytes of a value's shard in each of some layouts, those of one end or the distinct ones of several."""
        shape, itemsize = _kind(value)
        found = ends[0] if len(ends) == 1 else tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))
        make = lambda: np.array([float(shard_bytes(shape, itemsize, layout, self.mesh.shape)) for layout in found])  # noqa: E731
        return self.alike(("bytes", shape, itemsize), ends, make)

    def _moved_bytes(self, value: fx.Node, ends: Sequence[tuple[Layout, ...]]) -> tuple[np.ndarray, np.ndarray]:
        """(given, wanted) bytes of what is wanted; the same with nothing where it is what is given."""
        sizes = self._bytes(value, ends)
        there = np.tile(sizes, (len(sizes), 1))
        return there, there - np.diag(sizes)

    def _budgets(self) -> tuple[Row, ...]:
        """What may be sent on an axis: of transfers what they send, of a group's state what is handed over in it."""
        limits = self.constraints.communication
        moved = list(self._moved()) if limits else []
        return rows(limits, self.mesh, self.price, moved, [len(c) for c in self.costs])

    def _moved(self) -> Iterator[Moved]:
        for name, (transfer, ends) in self.brought.items():
            layouts = tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))
            yield Moved(*_kind(self.graph.by_name[name]), layouts, transfer=transfer)
        for var, group in self.joined:
            options = [self.node_vars[n.name][1] for n in group.nodes]
            for state, chosen in enumerate(zip(*options, strict=True)):
                for member, output, want in handed_over(group, chosen):
                    value, have = outputs_of(group.nodes[member])[output], chosen[member].outputs[output]
                    assert value is not None and have is not None
                    yield Moved(plain_shape(value.shape), value.dtype.itemsize, (have, want), var=var, state=state)

    def _variable(self, name: str, costs: np.ndarray, start: int = 0) -> int:
        self.start.append(start)
        self.costs.append(costs)
        self.names.append(name)
        return len(self.costs) - 1

    def _edge(self, i: int, j: int, costs: np.ndarray) -> None:
        self.edges.append((i, j))
        self.edge_costs.append(costs)

    def _node(self, node: fx.Node) -> None:
        specs = self._admitted(node)
        self.node_vars[node.name] = (self._variable(node.name, self._computing(node, specs)), specs)

    def _computing(self, node: fx.Node, specs: tuple[OpSpec, ...]) -> np.ndarray:
        call = self.annotated.calls.get(node.name)
        if call is None or self.objective == "communication":
            return np.zeros(len(specs))
        return self.alike(("compute", call), (specs,), lambda: np.array(_compute_times(call, specs, self.mesh)))

    def _free(self, node: fx.Node) -> bool:
        """Whether nobody said anything about a node."""
        return not _pins(node, self.constraints) and node.name not in self.constraints.specs

    def _group(self, group: Group) -> None:
        """One variable for all nodes of a group: what they compute, and what is reduced between them."""
        _, costs, options = self._joint(group)
        var = self._variable(group.nodes[-1].name, costs)
        self.joined.append((var, group))
        for node, specs in zip(group.nodes, options, strict=True):
            self.node_vars[node.name] = (var, specs)

    def _joint(self, group: Group) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, tuple[tuple[OpSpec, ...], ...]]:
        """What the nodes of a group may do together: as ``joint_specs``, what each costs, and the specs of each node."""
        specs = [self.annotated.specs[n.name] for n in group.nodes]
        key = "group", group.sources, tuple(self.annotated.calls[n.name] for n in group.nodes)
        return self.alike(key, specs, lambda: self._joint_costs(group, joint_specs(group, self.annotated.specs)))

    def _joint_costs(
        self, group: Group, joint: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[tuple[int, ...], ...], np.ndarray, tuple[tuple[OpSpec, ...], ...]]:
        specs = self.annotated.specs
        states = np.array(joint, dtype=np.int64).reshape(len(joint), len(group.nodes))
        costs = np.zeros(len(states))
        for column, node in zip(states.T, group.nodes, strict=True):
            costs += self._computing(node, specs[node.name])[column]
        for state, row in enumerate(states):
            chosen = [specs[node.name][k] for node, k in zip(group.nodes, row, strict=True)]
            for member, output, want in handed_over(group, chosen):
                value, have = outputs_of(group.nodes[member])[output], chosen[member].outputs[output]
                assert value is not None and have is not None
                costs[state] += path_price(have, want, plain_shape(value.shape), value.dtype.itemsize, self.mesh, self.price)
        return joint, costs, tuple(tuple(specs[n.name][k] for k in column) for column, n in zip(states.T, group.nodes, strict=True))

    def _admitted(self, node: fx.Node) -> tuple[OpSpec, ...]:
        """The node's specs that its pins and the plan admit."""
        specs = self.annotated.specs[node.name]
        pins = _pins(node, self.constraints)
        wishes = [(pin.said, _gives(pin, output)) for pin, output in pins]
        want = self.constraints.specs.get(node.name)
        if not wishes and want is None:
            return specs
        for pin, output in pins:
            if not any(pin.admits(s.outputs[output]) for s in specs):
                gives = "always gives it" if pin.forbidden else "never gives that layout"
                raise ConstraintError(
                    f"{pin.said} cannot hold: {node.name} ({_op(node)}) {gives}",
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
        return _all_hold(specs, wishes, place(node, self.graph))

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
                wishes.append((said, Condition(whole.inputs[index], said).admits))
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
                    found.setdefault(operand.name, []).append(Reader(var, self._layouts(specs, "inputs", k), node.name, k))
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
        return Reader(var, self._layouts(specs, "outputs", 0), "output", index)

    def _layouts(self, specs: tuple[OpSpec, ...], ends: str, index: int) -> tuple[Layout, ...]:
        """The layouts of one of the ``inputs`` or ``outputs`` of all specs."""
        return self.alike(("layouts", ends, index), (specs,), lambda: tuple(getattr(s, ends)[index] for s in specs))

    def _value(self, node: fx.Node, readers: tuple[Reader, ...]) -> None:
        """The transfer of a value from the layout that its producer gives to those that its readers want."""
        source, index = producer(node)
        var, specs = self.node_vars[source.name]
        have = self._layouts(specs, "outputs", index)
        others = [r for r in readers if r.var != var]  # one that is the producer (an input returned as it is) moves nothing
        if not others:
            return
        ends = [have, *(r.layouts for r in others)]
        prices, (source_numbers, *wants) = self.alike(("prices", *_kind(node)), ends, lambda: self._priced(node, ends))
        alike = {(r.var, want.tobytes()): (r.var, want) for r, want in zip(others, wants, strict=True)}
        self.brought[node.name] = len(self.transfers), ends
        self.transfers.append(Transfer(var, source_numbers, tuple(alike.values()), prices))

    def _priced(self, node: fx.Node, ends: Sequence[tuple[Layout, ...]]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Prices between all layouts at the ends of a value, and for each end the numbers of its layouts among them."""
        layouts = tuple(dict.fromkeys(itertools.chain.from_iterable(ends)))
        number = {layout: k for k, layout in enumerate(layouts)}
        prices = _prices(self._table(node, layouts), layouts)
        return prices, [np.array([number[layout] for layout in end]) for end in ends]

    def _table(self, node: fx.Node, layouts: Sequence[Layout]) -> Table:
        ops = tuple(sorted({"sum", *(p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial))}))
        return table(*_kind(node), self.mesh, ops, self.price)

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

    def _equalities(self) -> None:
        """What the user wants to lie alike lies as the first of it."""
        for equality in self.constraints.equal:
            (first, layouts), *others = map(self._at, equality.places)
            for var, its in others:
                self._edge(first, var, _agree(layouts, its))

    def _start_equal(self) -> None:
        """The start agrees on them, in the first layout that all can have."""
        for equality in self.constraints.equal:
            ends = [self._at(place) for place in equality.places]
            common = next((layout for layout in ends[0][1] if all(layout in layouts for _, layouts in ends)), None)
            if common is not None:
                for var, layouts in ends:
                    self.start[var] = layouts.index(common)

    def _at(self, place: Place) -> tuple[int, tuple[Layout | None, ...]]:
        """(variable, the layout of a place in each of its states)."""
        if place.result in self.result_vars:
            return self.result_vars[place.result]
        source, index = producer(self.graph.by_name[place.node])
        var, specs = self.node_vars[source.name]
        output = index if source.name != place.node else place.output
        return var, tuple(s.outputs[output] for s in specs)


def _kind(node: fx.Node) -> tuple[tuple[int, ...], int]:
    value = node.meta["val"]
    return plain_shape(value.shape), value.dtype.itemsize


@lru_cache(maxsize=8192)
def _compute_times(call: Call, specs: tuple[OpSpec, ...], mesh: Mesh) -> tuple[float, ...]:
    return tuple(compute_time(call, s, mesh) for s in specs)


def _prices(paths: Table, layouts: Sequence[Layout]) -> np.ndarray:
    """(len(layouts), len(layouts)) prices of the cheapest paths."""
    numbers = [paths.index[layout] for layout in layouts]
    return paths.prices[np.ix_(numbers, numbers)]


def _agree(left: Sequence[Layout | None], right: Sequence[Layout | None]) -> np.ndarray:
    """0 where two layouts are equal, inf elsewhere."""
    return np.array([[0.0 if a == b else np.inf for b in right] for a in left])


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


def _gives(pin: Condition, output: int) -> Callable[[OpSpec], bool]:
    return lambda spec: pin.admits(spec.outputs[output])


def _is_spec(want: OpSpec, spec: OpSpec) -> bool:
    return spec.outputs == want.outputs and (not want.inputs or spec.inputs == want.inputs)


def place(node: fx.Node, graph: PlanningGraph) -> str:
    """The user's line behind a node, the user's name of an input."""
    return source_line(node) or next((f"{i.kind} {i.name}" for i in graph.inputs if i.node == node.name), f"node {node.name}")


def _pins(node: fx.Node, constraints: Constraints) -> list[tuple[Condition, int]]:
    """(pin, output index) on the node or on its getitems."""
    pins = [(pin, pin.output) for pin in constraints.values.get(node.name, ())]
    for user in node.users:
        if producer(user)[0] is node and user is not node:
            pins += [(pin, producer(user)[1]) for pin in constraints.values.get(user.name, ())]
    return pins


def result_layouts(node: fx.Node, mesh: Mesh) -> list[Layout]:
    """Layouts in which an output may be returned."""
    return input_layouts(node, mesh)


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op
