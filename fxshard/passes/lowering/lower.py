"""lower: turns a planning graph and its plan into a ShardedProgram with one local graph per size class.

Each node becomes its local form on local shapes. Each redistribution of the plan is emitted once: right before its first reader or, for a
value that is only returned, right after its producer. An operator whose operands or results are empty on a rank becomes its neutral
element.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial

import fxshard.ops  # noqa: F401  (registers torch.ops.fxshard)
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard._torch_compat.sizes.symbols import SymbolEnv, are_numbers, is_symbolic, noting_lines, oblivious, plain, surely
from fxshard.cost.timeline import bytes_sent
from fxshard.errors import PlanError
from fxshard.graph.call import Call, calls_of
from fxshard.graph.planning_graph import (
    PlanningGraph,
    example_shape,
    is_getitem,
    is_tensor,
    is_user_file,
    operands,
    outputs_of,
    plain_shape,
    planned_nodes,
    producer,
    source_line,
    user_location,
)
from fxshard.graph.tangents import outputs_with_tangents
from fxshard.layout.layouts import Layout, symbolic_coordinate
from fxshard.layout.redistribution import sent_bytes, walk
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.recompute import expand
from fxshard.passes.annotation.verify import verify_blocks, verify_edges
from fxshard.passes.lowering.context import Context
from fxshard.passes.lowering.emit import emit_step
from fxshard.passes.lowering.local_graph import NUMBERS, LocalGraph, SymbolicValues, Values
from fxshard.passes.lowering.shaping import padded
from fxshard.passes.lowering.size_classes import cuts, size_classes
from fxshard.plans.offload import PARAMETERS
from fxshard.plans.plan_data import OpSpec, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import (
    KINDS,
    ProgramCollective,
    ProgramSize,
    ShardedProgram,
    SizeClass,
    coordinate_symbols,
)
from fxshard.shapes import DynamicDim, GraphFamily, depends_on, distinct, range_in_units, units_of
from fxshard.strategies import local_form, own_collectives
from fxshard.strategies.engine.conversion import identity
from fxshard.strategies.engine.factors import known_equal

aten = torch.ops.aten

ACCEPT_NEUTRAL_ELEMENT = frozenset({aten.amax.default, aten.amin.default, aten.max.default, aten.min.default})
"""Operators whose result an additional neutral element does not change."""
DEFINED_FOR_EMPTY = frozenset({aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims})
"""Operators with a defined result, the neutral element, for an empty input."""


CRASH_ON_EMPTY = frozenset({aten.native_batch_norm_backward.default})
"""Operators whose CPU kernels divide integers by the number of rows: without rows they kill the process."""
NEEDS = "does not accept an empty shard"


def lower(graph: PlanningGraph, plan: ShardingPlan, *, deferred: bool = False) -> ShardedProgram:
    """Lowers ``graph`` by ``plan``; raises PlanError if the plan is for another graph or lacks a node.

    ``deferred``: gradients may be returned as pending sums (``defer_reductions``). A graph with dynamic dims gives a program for all their
    sizes that are multiples of its units (``ProgramSize``); raises SizesError if there are none.
    """
    return lower_checked(graph, check_plan(graph, plan, deferred=deferred), plan)


def lower_checked(graph: PlanningGraph, checked: PlanningGraph, plan: ShardingPlan) -> ShardedProgram:
    """The same for ``checked``, the result of ``check_plan``."""
    if graph.family is not None:
        return _lower_family(graph, graph.family, plan)
    return _lower_at(checked, plan)


def _lower_at(graph: PlanningGraph, plan: ShardingPlan) -> ShardedProgram:
    """Lowers a graph with numeric sizes."""
    all_cuts = cuts(_tensors(graph, plan), plan.mesh)
    return _lowered(graph, plan, size_classes(all_cuts, plan.mesh), NUMBERS)


def _lower_family(graph: PlanningGraph, family: GraphFamily, plan: ShardingPlan) -> ShardedProgram:
    """Lowers a graph for all sizes of its dynamic dims that are multiples of their units: shards are even and one graph serves all ranks.

    For dims that may be ``uneven``, shard lengths are expressions in the size and the rank's coordinate on each axis.
    """
    mesh = plan.mesh
    cut = list(_cut_dims(_expanded(graph, family.module, plan), plan))
    loose = {family.symbols[dim.name] for dim in family.dims if dim.uneven}
    units = units_of(((size, math.prod(parts)) for size, parts in cut if not depends_on(size, loose)), family.symbols)
    env = SymbolEnv()
    counted = {dim.name: _counted(dim, units[dim.name], env) for dim in family.dims}
    by_rank = any(depends_on(size, loose) for size, _ in cut)
    with oblivious():
        symbolic = _expanded(graph, family.in_environment(env, {name: part * units[name] for name, part in counted.items()}), plan)
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env.shape_env)
        classes = size_classes(cuts(_tensors(symbolic, plan), mesh), mesh)
        ranks = coordinate_symbols(mesh, env) if by_rank else ()
        known = SymbolicValues(mode)
        program = _lowered(symbolic, plan, classes, known, ranks)
        sizes = tuple(ProgramSize(d.name, d.places, units[d.name], counted[d.name], d.least, d.most, d.uneven) for d in family.dims)
        program = replace(program, sizes=sizes)
        needed = [one for size, where in known.needed for one in program.guards_on(size > 0, where)]
    return replace(program, guards=distinct((*family.guards, *program.noted_guards(), *needed)))


def _counted(dim: DynamicDim, unit: int, env: SymbolEnv) -> torch.SymInt:
    example = max(-(-dim.example // unit), 2)
    return env.symbol(dim.name, example, *range_in_units(dim.least, dim.most, unit, example))


def _cut_dims(graph: PlanningGraph, plan: ShardingPlan) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """(symbolic size of a dim, number of parts per axis that cuts it), for all tensors of the program."""
    for shape, layout in _tensors(graph, plan):
        for dim, size in enumerate(shape):
            axes = layout.nest_on(dim) or layout.axes_on(dim)
            if axes and is_symbolic(size):
                yield size, tuple(plan.mesh.shape[axis] for axis in axes)


def _expanded(graph: PlanningGraph, module: fx.GraphModule, plan: ShardingPlan) -> PlanningGraph:
    return expand(replace(graph, module=module, family=None), plan.recomputed)


def _lowered(
    graph: PlanningGraph, plan: ShardingPlan, classes: dict[tuple[int, ...], SizeClass], known: Values, ranks: tuple[ProgramSize, ...] = ()
) -> ShardedProgram:
    modules: dict[Any, fx.GraphModule] = {}
    issued: tuple[ProgramCollective, ...] = ()
    for coordinate, size_class in classes.items():
        if size_class in modules:
            continue
        place = symbolic_coordinate(coordinate, [one.value for one in ranks]) if ranks else coordinate
        lowering = _Lowering(graph, plan, LocalGraph(plan.mesh, place, known))
        with noting_lines(is_user_file, lowering.user_location) if known is not NUMBERS else contextlib.nullcontext():
            modules[size_class] = lowering.run()
        issued = issued or tuple(lowering.collectives)
    ends = [n for n in graph.nodes if n.op == "placeholder"]
    results = operands(graph.module.graph.output_node())
    return ShardedProgram(
        mesh=plan.mesh,
        plan=plan,
        modules=modules,
        inputs=graph.inputs,
        outputs=outputs_with_tangents(graph),
        input_layouts=tuple(plan.specs[n.name].outputs[0] for n in ends),
        output_layouts=plan.specs["output"].inputs,
        input_shapes=tuple(_shape(n) for n in ends),
        output_shapes=tuple(_shape(n) for n in results),
        input_dtypes=tuple(str(n.meta["val"].dtype) for n in ends),
        output_dtypes=tuple(str(n.meta["val"].dtype) for n in results),
        in_spec=graph.in_spec,
        out_spec=graph.out_spec,
        collectives=issued,
        classes=classes,
        aliases=graph.aliases,
        constants=graph.constants,
        ranks=ranks,
    )


def check_plan(graph: PlanningGraph, plan: ShardingPlan, *, deferred: bool = False) -> PlanningGraph:
    """The graph with the plan's recomputed nodes added; raises PlanError unless the plan matches the graph and is consistent."""
    if plan.graph_hash != graph.hash:
        raise PlanError(
            f"the plan is for another graph (hash {plan.graph_hash[:12]}, this model has {graph.hash[:12]})",
            where=f"plan on mesh {plan.mesh}",
            remedy="plan again: the model, its shapes, dtypes, its dynamic_shapes, its train mode or the registered rules have changed",
        )
    verify_blocks(graph, plan)
    graph = expand(graph, plan.recomputed)
    missing = [n.name for n in planned_nodes(graph) if n.name not in plan.specs]
    if missing:
        raise PlanError(
            f"the plan has no OpSpec for {missing[0]} ({len(missing)} nodes in all)",
            where=source_line(graph.by_name[missing[0]]) or f"plan on mesh {plan.mesh}",
            remedy="pass a partial plan as pins= to fxshard.plan, which fills the rest",
        )
    verify_edges(graph, plan, deferred=deferred)
    return graph


def _shape(node: fx.Node) -> tuple[int, ...]:
    return plain_shape(node.meta["val"].shape)


def _tensors(graph: PlanningGraph, plan: ShardingPlan) -> list[tuple[tuple[int, ...], Layout]]:
    """(global shape, layout) of all tensors of the program, including those between redistribution steps."""
    found = []
    for node in planned_nodes(graph):
        spec = plan.specs[node.name]
        found += [(_shape(o), layout) for o, layout in zip(operands(node), spec.inputs, strict=True)]
        outs = outputs_of(node) if node.op != "output" else ()
        found += [(plain_shape(o.shape), layout) for o, layout in zip(outs, spec.outputs, strict=True) if o is not None]
    for entry in plan.redistributions:
        shape = _shape(graph.by_name[entry.value])
        found += [(shape, after) for _, _, after in walk(entry.source, entry.steps)]
    return found


@dataclass
class _Lowering:
    """The state of lowering one size class."""

    graph: PlanningGraph
    plan: ShardingPlan
    local: LocalGraph
    values: dict[str, fx.Node] = field(default_factory=dict)
    """Local values by name, as they are emitted."""
    fetched: dict[tuple[str, str], fx.Node] = field(default_factory=dict)
    """Copies on the device of parameters on the host, by name and half."""
    moved: dict[int, fx.Node] = field(default_factory=dict)
    """Results by the index of their redistribution."""
    collectives: list[ProgramCollective] = field(default_factory=list)
    numbers: dict[str, fx.Node] = field(default_factory=dict)
    """Results of calls that return no tensor, by name."""

    def run(self) -> fx.GraphModule:
        self.moves = {reader: i for i, r in enumerate(self.plan.redistributions) for reader in r.readers}
        self.calls = calls_of(self.graph)
        self._place = {n.name: k for k, n in enumerate(self.plan.nodes, len(self.plan.redistributions))}
        self.times = times = Lifetimes(self.graph)
        self.on_host = {node for node, kind in self.plan.on_host.items() if kind == PARAMETERS}
        self.returned: dict[str, list[int]] = {}
        self.ahead: dict[str, list[int]] = {}
        for i, r in enumerate(self.plan.redistributions):
            if r.ahead:
                self.ahead.setdefault(r.value, []).append(i)
            if times.only_returned(self.graph.by_name[r.value]):
                self.returned.setdefault(r.value, []).append(i)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
        for turn, node in enumerate(self.graph.nodes):
            self.local.origin, self.local.turn, self.local.part = node, turn, 0.0
            if node.op == "call_function" and not is_getitem(node):
                self._call(node)
            elif node.op == "output":
                self._output(node)
            elif node.op == "get_attr":
                raise PlanError(
                    f"the graph holds a constant tensor {node.target}", where=source_line(node), remedy="register it as a buffer"
                )
        return self.local.finish()

    def _placeholder(self, node: fx.Node) -> None:
        layout = self.plan.specs[node.name].outputs[0]
        shape, value = self.local.local_shape(_shape(node), layout), node.meta["val"]
        self.values[node.name] = self.local.placeholder(node.name, shape, value)

    def _output(self, node: fx.Node) -> None:
        results = [self._read(o, node.name, k) for k, o in enumerate(operands(node))]
        self.local.graph.output(tuple(results))

    def _read(self, operand: fx.Node, reader: str, position: int) -> fx.Node:
        """The local tensor of an operand, redistributed if the plan lists a redistribution for this reader."""
        for index in self.ahead.get(operand.name, ()):
            self._move(operand, index)
        if (reader, position) not in self.moves:
            return self._value(operand)
        return self._move(operand, self.moves[reader, position])

    def _value(self, operand: fx.Node) -> fx.Node:
        """The local tensor of a value as it is produced; a parameter on the host is copied to the device once in each half."""
        origin = self.local.origin
        if operand.name not in self.on_host or origin is None:
            return self.values[operand.name]
        half = "backward" if self.times.in_backward(origin) else "forward"
        if (operand.name, half) not in self.fetched:
            self.fetched[operand.name, half] = self.local.emit(torch.ops.fxshard.from_host.default, self.values[operand.name], half)
        return self.fetched[operand.name, half]

    def _move(self, operand: fx.Node, index: int) -> fx.Node:
        """The result of a redistribution, emitted on first use."""
        if index in self.moved:
            return self.moved[index]
        entry, shape = self.plan.redistributions[index], _shape(operand)
        x = self._value(operand) if entry.source == self._layout_of(operand) else self._move(operand, self._predecessor(entry))
        steps = partial(self._steps, x, entry, shape)
        made = self.local.record_or_replay((entry.source, entry.steps, tuple(map(plain, shape))), None, [x], steps)
        for number, ((layout, step, _), (_, collective)) in enumerate(zip(walk(entry.source, entry.steps), made, strict=True)):
            if collective is not None:
                self._record(collective, entry, shape, index, number, step, layout)
        x = made[-1][0] if made else x
        self._verify(x, shape, entry.target, operand)
        self.moved[index] = x
        return x

    def _steps(self, x: fx.Node, entry: Redistribution, shape: tuple[int, ...]) -> tuple[tuple[fx.Node, fx.Node | None], ...]:
        """(result, collective or None) of each step."""
        made = []
        for layout, step, _ in walk(entry.source, entry.steps):
            x, collective = emit_step(self.local, x, step, layout, shape)
            made.append((x, collective))
        return tuple(made)

    def _layout_of(self, operand: fx.Node) -> Layout:
        source, output = producer(operand)
        return self.plan.specs[source.name].outputs[output]

    def _predecessor(self, entry: Redistribution) -> int:
        """The redistribution whose result ``entry`` starts from."""
        made = self._layout_of(self.graph.by_name[entry.value])
        entries = enumerate(self.plan.redistributions)
        return next(i for i, r in entries if (r.value, r.source, r.target) == (entry.value, made, entry.source))

    def _record(
        self, node: fx.Node, entry: Redistribution, shape: tuple[int, ...], index: int, number: int, step: Any, layout: Layout
    ) -> None:
        buffer = node.args[0].meta["val"]
        mesh = self.plan.mesh
        self.collectives.append(
            ProgramCollective(
                kind=step.kind,
                axis=mesh.axis_names[step.axis],
                bytes=sent_bytes(step, layout, example_shape(shape), entry.itemsize, mesh),
                shape=example_shape(buffer.shape),
                dtype=str(buffer.dtype),
                node=node.name,
                serves=((index, number),),
            )
        )

    def _record_own(self, started: fx.Node, node: fx.Node, number: int) -> None:
        """Records a collective that a node's local form issues."""
        buffer, mesh = started.args[0].meta["val"], self.plan.mesh
        shape, axis = example_shape(buffer.shape), started.args[-1]
        sent = bytes_sent(started, mesh.shape[mesh.axis(axis)])
        serves = (self._place[node.name], number)
        self.collectives.append(ProgramCollective(KINDS[started.target], axis, sent, shape, str(buffer.dtype), started.name, (serves,)))

    def _call(self, node: fx.Node) -> None:
        spec = self.plan.specs[node.name]
        reads = [self._read(o, node.name, k) for k, o in enumerate(operands(node))]
        if node.name in self.graph.run_time_causes:
            results: Any = self.local.copied(node, *self._arguments(node, reads))
        else:
            call = self.calls[node.name]
            emitted = partial(self._emitted, node, call, spec, reads)
            results, issued = self.local.record_or_replay((id(call), id(spec)), (call, spec), reads, emitted)
            for number, collective in enumerate(issued):
                self._record_own(collective, node, number)
        if outputs_of(node):
            self._store(node, spec, results)
        else:
            self.numbers[node.name] = results

    def _arguments(self, node: fx.Node, reads: list[fx.Node]) -> Any:
        """Args and kwargs with local tensors in place of the operands."""
        count = iter(reads)
        return fx.map_arg((node.args, dict(node.kwargs)), lambda a: next(count) if is_tensor(a) else self.numbers[a.name])

    def _emitted(self, node: fx.Node, call: Call, spec: OpSpec, reads: list[fx.Node]) -> Any:
        """Emits the local form of a call and returns its result, and the collectives that it issues."""
        context = Context(node, call, spec, self.local)
        context.args, context.kwargs = self._arguments(node, reads)
        self._handle_empty_shards(context)
        if context.is_empty and not own_collectives(call, spec, self.plan.mesh):
            return self._neutral(context), ()
        return local_form(call)(context), tuple(context.issued)

    def _store(self, node: fx.Node, spec: OpSpec, results: Any) -> None:
        outs = outputs_of(node)
        if is_tensor(node):
            self._verify(results, _shape(node), spec.outputs[0], node)
            self.values[node.name] = results
            self._return(node)
            return
        for user in node.users:
            index = user.args[1]
            result = results[index] if isinstance(results, tuple) else self.local.item(results, index)
            self._verify(result, plain_shape(outs[index].shape), spec.outputs[index], node)
            self.values[user.name] = result
            self._return(user)

    def _return(self, value: fx.Node) -> None:
        """Redistributes a value that is only returned at once, so that the original can be freed."""
        for index in self.returned.get(value.name, ()):
            self._move(value, index)

    def _handle_empty_shards(self, context: Context) -> None:
        """Handles shards that may be empty at some symbolic sizes. Operands of a maximum or minimum get one neutral element appended; if
        the operator is not in ``ACCEPT_NEUTRAL_ELEMENT``, a guard requires that the shard is not empty."""
        if context.target in CRASH_ON_EMPTY:
            sizes = self.local.shape(context.args[0])
            self.local.known.needed += [(n, self._needs(context)) for n in sizes if is_symbolic(n) and not surely(n > 0)]
        reduced = {a: p.reduce_op for layout in context.outputs for a, p in enumerate(layout) if isinstance(p, Partial)}
        reduced = {axis: op for axis, op in reduced.items() if op in ("max", "min")}
        if not reduced or context.target in DEFINED_FOR_EMPTY:
            return
        args = list(context.args)
        for k, layout in enumerate(context.inputs):
            for dim, size in enumerate(self.local.shape(args[k]) if isinstance(args[k], fx.Node) else ()):
                op = next((reduced[axis] for axis in layout.axes_on(dim) if axis in reduced), None)
                if op is None or not is_symbolic(size) or surely(size > 0):
                    continue
                if context.target not in ACCEPT_NEUTRAL_ELEMENT:
                    self.local.known.needed.append((size, self._needs(context)))
                    continue
                missing = [0, 0] * (args[k].meta["val"].dim() - 1 - dim) + [0, torch.sym_max(1 - size, 0)]
                args[k] = padded(self.local, args[k], missing, identity(op, args[k].meta["val"].dtype))
        context.args = tuple(args)

    def _needs(self, context: Context) -> str:
        return f"{self.user_location()}: {context.target} {NEEDS}".removeprefix("None: ")

    def user_location(self, trace: str = "") -> str | None:
        """``file:line`` of the user's code for the node that is being lowered."""
        origin = self.local.origin
        return None if origin is None else user_location(origin.meta.get("stack_trace") or "")

    def _neutral(self, context: Context) -> Any:
        results = tuple(
            None
            if meta is None
            else self.local.emit(
                aten.full.default, list(context.output_shape(i)), neutral(context.outputs[i], meta.dtype), dtype=meta.dtype
            )
            for i, meta in enumerate(context.call.outputs)
        )
        return results[0] if context.single else results

    def _verify(self, x: fx.Node, shape: tuple[int, ...], layout: Layout, node: fx.Node) -> None:
        """Raises PlanError unless the local tensor has the shape that its layout implies."""
        want, have = self.local.local_shape(shape, layout), self.local.shape(x)
        if are_numbers(want) and want == have:
            return
        if not all(known_equal(a, b) for a, b in zip(have, want, strict=True)):
            raise PlanError(
                f"{node.name} ({node.target}) should be {want} on a rank (layout {layout} of {shape}) but is {have}",
                where=source_line(node),
                remedy="a rule offers a sharding that its operator cannot do; please report it",
            )


def neutral(layout: Layout, dtype: torch.dtype) -> float | int | bool:
    """The contribution of an empty shard: 0 to a sum, 1 to a product, the least value to a maximum, the greatest to a minimum."""
    return identity(next((p.reduce_op for p in layout if isinstance(p, Partial)), "sum"), dtype)
