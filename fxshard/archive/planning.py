"""The planning graph beside a program in its file, from which the program is planned again for another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxshard._torch_compat.sizes.symbols import SymbolEnv, oblivious, symbol_of
from fxshard.archive.container import PLANNED_GRAPH, PLANNING, Container
from fxshard.archive.graphs import read_graph, write_graph
from fxshard.archive.sizes import FileSizes, write_guards, write_sizes
from fxshard.errors import FileError
from fxshard.files import Field, Readers, parse_json, write_json
from fxshard.graph.planning_graph import Calls, PlanningGraph
from fxshard.program.sharded_program import ProgramSize, ShardedProgram
from fxshard.shapes import Guard, first_broken, guards_of, range_in_units
from fxshard.shapes.dims import DynamicDim
from fxshard.shapes.family import GraphFamily
from fxshard.shapes.guards import determined_by

_TAG = "partitioner_tag"
RNG = ("fxshard", "torch")


@dataclass(frozen=True)
class Planning:
    """A planning graph, and how it was lowered: its source of random numbers, and the passes that were left out."""

    graph: PlanningGraph
    rng: str = RNG[0]
    without: tuple[str, ...] = ()


def write_planning(program: ShardedProgram, planning: Planning) -> dict[str, bytes]:
    """The entries of the planning graph of ``program``; raises FileError for a graph that a file cannot hold."""
    graph = planning.graph
    reasons = {
        "hands out DTensors or shards": bool(graph.forms),
        "recomputes what the model marks for it": any("recompute" in node.meta for node in graph.nodes),
        "has other ends than its program": (graph.inputs, graph.outputs) != (program.inputs, program.outputs),
    }
    for reason, holds in reasons.items():
        if holds:
            raise FileError(f"the planning graph {reason}, which a file cannot hold", remedy="export without replan=True, for each mesh")
    said = {
        "train": graph.train,
        "rng": planning.rng,
        "without": list(planning.without),
        "unreduced": sorted(graph.unreduced),
        "returned": {name: [list(call) for call in calls] for name, calls in sorted(graph.returned.items())},
        "meta": {node.name: tag for node in graph.nodes if isinstance(tag := node.meta.get(_TAG), str)},
    }
    module, sizes = _for_every_size(graph)
    said |= {} if graph.family is None else {"sizes": write_sizes(sizes), "guards": write_guards(graph.family.guards)}
    return {PLANNING: write_json(said).encode(), PLANNED_GRAPH: write_graph(module, sizes)}


def _for_every_size(graph: PlanningGraph) -> tuple[fx.GraphModule, tuple[ProgramSize, ...]]:
    """(the graph for all sizes, its dynamic dims as a file holds sizes, in units of one), with symbols that no guard has replaced."""
    if graph.family is None:
        return graph.module, ()
    env, sizes = SymbolEnv(), list[ProgramSize]()
    for dim in graph.family.dims:
        value = env.symbol(dim.name, dim.example, *range_in_units(dim.least, dim.most, 1, dim.example))
        sizes.append(ProgramSize(dim.name, dim.places, 1, value, dim.least, dim.most, dim.uneven))
    with oblivious():
        return graph.family.in_environment(env, {one.name: one.value for one in sizes}), tuple(sizes)


def read_planning(container: Container, program: ShardedProgram) -> Planning | None:
    """The planning graph in a file, None if it has none; raises FileError unless it is the one that the program's plan is for."""
    if not container.has(PLANNING):
        return None
    root = parse_json(container.read(PLANNING), f"{container.path}: planning")
    readers: Readers = {
        "train": Field.boolean,
        "rng": _generator,
        "without": lambda f: f.tuple_of(Field.text),
        "unreduced": lambda f: frozenset(f.tuple_of(Field.text)),
        "returned": lambda f: {name: _calls(one) for name, one in f.entries().items()},
        "meta": lambda f: {name: one.text() for name, one in f.entries().items()},
    }
    sizes = FileSizes(root.get("sizes", lambda f: f.items(), list[Field]()))
    said = root.record(readers, {"sizes": Field.plain, "guards": lambda f: f.tuple_of(sizes.guard)})
    module = read_graph(container.read(PLANNED_GRAPH), f"{container.path}: planning graph", {}, sizes)
    _restore_tags(module, said.pop("meta"), root)
    family = _family(module, sizes, said.pop("guards", ()), root) if said.pop("sizes", ()) else None
    rng, without, same = said.pop("rng"), said.pop("without"), ("inputs", "outputs", "in_spec", "out_spec", "aliases", "constants")
    ends: dict[str, Any] = {name: getattr(program, name) for name in same}
    graph = PlanningGraph(module, **{**ends, "aliases": dict(ends["aliases"])}, **said, family=family)
    try:
        graph = graph.with_family(module)
    except Exception as error:  # torch may raise anything for sizes that do not fit together
        raise root.fail(f"the planning graph has no values at its example: {error}") from error
    if graph.hash != program.plan.graph_hash:
        raise root.fail("the planning graph is not the one that the plan is for")
    return Planning(graph, rng, without)


def _family(module: fx.GraphModule, sizes: FileSizes, guards: tuple[Guard, ...], root: Field) -> GraphFamily:
    """The graph for all sizes; raises FileError if it takes something for granted that the file does not say."""
    dims = tuple(DynamicDim(one.name, one.places, one.example, one.least, one.most, uneven=one.uneven) for one in sizes.sizes)
    symbols = {one.name: symbol_of(one.value) for one in sizes.sizes}
    if (broken := first_broken(guards, {dim.name: dim.example for dim in dims})) is not None:
        raise root.fail(f"the sizes of the example break {broken.condition}")
    known = {guard.condition for guard in guards}
    for guard in guards_of(sizes.env.known):
        if guard.condition not in known:
            raise root.fail(f"the planning graph takes for granted that {guard.condition}, which the file does not say")
    return GraphFamily(module, dims, symbols, guards, determined_by(guards, symbols))


def _generator(field: Field) -> str:
    if field.text() not in RNG:
        raise field.fail(f"{field.value[:40]!r} is no source of random numbers", f"they are {' and '.join(RNG)}")
    return field.text()


def _calls(field: Field) -> Calls:
    return field.tuple_of(lambda call: call.tuple_of(lambda one: one.optional(Field.text)))


def _restore_tags(module: fx.GraphModule, tags: Mapping[str, str], root: Field) -> None:
    nodes = {node.name: node for node in module.graph.nodes}
    for name, tag in tags.items():
        if name not in nodes:
            raise root.fail(f"the planning graph has no node {name!r}")
        nodes[name].meta[_TAG] = tag
