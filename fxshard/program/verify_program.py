"""The invariants of a program: local shapes of inputs and outputs; the same collectives on every rank, each from the plan and waited for
once.

Checked after lowering, and for every file that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from fxshard._torch_compat.nodes import in_order
from fxshard._torch_compat.sizes.symbols import expression, is_symbolic, surely
from fxshard.errors import PlanError
from fxshard.graph.planning_graph import GraphInput, GraphOutput, example_shape, plain_shape
from fxshard.layout.layouts import Layout, local_shape
from fxshard.program.sharded_program import KINDS, ShardedProgram, SizeClass, is_collective, is_wait

REMEDY = "this is a fault of the lowering pass; please report it"


def verify_program(program: ShardedProgram, *, deferred: bool = False) -> None:
    """Raises PlanError naming the size class and the node at fault. ``deferred``: gradients may be returned as pending sums."""
    coordinates: dict[SizeClass, tuple[int, ...]] = {}
    for coordinate, size_class in program.classes.items():
        coordinates.setdefault(size_class, coordinate)
    if set(coordinates) != set(program.modules):
        raise PlanError("the program has graphs for other size classes than its ranks", remedy=REMEDY)
    for size_class, coordinate in coordinates.items():
        graph = program.modules[size_class].graph
        if not in_order(graph):
            graph.lint()
            raise PlanError("the graph is not in order", where=f"graph of the rank at {coordinate}", remedy=REMEDY)
        where = f"graph of the rank at {coordinate}"
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        if [n.name for n in inputs] != [end.node for end in program.inputs]:
            raise PlanError("the graph does not have the program's inputs", where=where, remedy=REMEDY)
        _verify_ends(program, coordinate, program.inputs, inputs, program.input_shapes, program.input_layouts, program.input_dtypes, where)
        results = graph.output_node().args[0]
        outputs = (program.output_shapes, program.output_layouts, program.output_dtypes)
        pending = ("gradient",) if deferred else ()
        _verify_ends(program, coordinate, program.outputs, results, *outputs, where, pending)
        _verify_collectives(program, graph, where)
    settled = next((one for one in program.sizes if not is_symbolic(one.value) or not expression(one.value).free_symbols), None)
    if settled is not None:
        raise PlanError(f"lowering has fixed the size {settled.name}, which should be dynamic", remedy=REMEDY)


def _verify_ends(
    program: ShardedProgram,
    coordinate: tuple[int, ...],
    ends: Sequence[GraphInput | GraphOutput],
    nodes: Sequence[fx.Node],
    shapes: Sequence[tuple[int, ...]],
    layouts: Sequence[Layout],
    dtypes: Sequence[str],
    where: str,
    pending: tuple[str, ...] = (),
) -> None:
    """Checks that each input or output has its local shape and dtype; only outputs of kinds in ``pending`` may have pending sums."""
    if len(nodes) != len(ends):
        raise PlanError(f"the graph has {len(nodes)} inputs or outputs, the program {len(ends)}", where=where, remedy=REMEDY)
    for end, node, shape, layout, dtype in zip(ends, nodes, shapes, layouts, dtypes, strict=True):
        value = node.meta["val"]
        want = local_shape(shape, layout, program.mesh.shape, program.indexes(coordinate))
        alike = len(value.shape) == len(want) and all(surely(a == b) for a, b in zip(plain_shape(value.shape), want, strict=True))
        if not alike or str(value.dtype) != dtype:
            what = f"{end.kind} {end.name} in {layout} is {tuple(value.shape)} {value.dtype}, not {want} {dtype}"
            raise PlanError(what, where=where, remedy=REMEDY)
        if isinstance(end, GraphOutput) and end.kind not in pending and layout.has_partial:
            raise PlanError(f"{end.kind} {end.name} is returned pending, in {layout}", where=where, remedy=REMEDY)


def _verify_collectives(program: ShardedProgram, graph: fx.Graph, where: str) -> None:
    """Checks that the graph issues the program's collectives in order and waits for each once."""
    first = {n.name for n in program.first.graph.nodes}
    decided = {(c.entry, c.step) for c in program.plan.collectives}
    foreign = [c.node for c in program.collectives if c.node not in first or not c.serves or not decided.issuperset(c.serves)]
    if foreign:
        raise PlanError(f"the collective {foreign[0]!r} is not in the graph, or not in the plan", where=where, remedy=REMEDY)
    nodes = [n for n in graph.nodes if is_collective(n)]
    have = [_signature(n) for n in nodes]
    want = [(c.kind, c.axis, c.shape, c.dtype) for c in program.collectives]
    if have != want:
        differing = next((pair for pair in zip(have, want, strict=False) if pair[0] != pair[1]), (len(have), len(want)))
        what = f"size classes issue different collectives: {differing[0]} here, {differing[1]} in the program"
        raise PlanError(what, where=where, remedy=REMEDY)
    for node in nodes:
        if len(node.users) != 1 or not all(map(is_wait, node.users)):
            raise PlanError(f"{node.name} must be read by one wait and by nothing else", where=where, remedy=REMEDY)


def _signature(node: fx.Node) -> tuple[str, Any, tuple[int, ...], str]:
    buffer: Any = node.args[0]
    value = buffer.meta["val"]
    return KINDS[node.target], node.args[-1], example_shape(value.shape), str(value.dtype)
