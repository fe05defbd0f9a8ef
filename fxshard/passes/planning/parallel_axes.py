"""What one-word plans (``fxshard.plans.parallel``) say about the values of a graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from fxshard.errors import closest
from fxshard.graph.planning_graph import PlanningGraph, example_shape
from fxshard.layout.layouts import Layout, placement_str
from fxshard.mesh.mesh import Mesh
from fxshard.passes.planning.names import some
from fxshard.plans.parallel import Parallel, leading, of_inputs

log = logging.getLogger("fxshard")


@dataclass(frozen=True)
class AxisCondition:
    """The value of ``node`` has ``placement`` on ``axis``, or does not if ``forbidden``; ``text``: the user's word, for errors.
    ``beside``: placements that will do as well if another axis shards the same dim. ``returned``: the condition holds for the value
    as the model returns it, if it does. ``optional``: as of ``Condition``."""

    node: str
    axis: str
    placement: Placement
    text: str
    forbidden: bool = False
    beside: tuple[Placement, ...] = ()
    returned: bool = False
    optional: bool = False


def axis_conditions(graph: PlanningGraph, parallel: Parallel) -> Iterator[AxisCondition]:
    """All that ``parallel`` says about the inputs, the parameters and the results of modules."""
    if not parallel:
        return

    def text(axis: str, name: str) -> str:
        return f"parallel={{{axis!r}: {parallel[axis].said_of(name)}}}"

    shapes = {end.name: example_shape(graph.by_name[end.node].meta["val"].shape) for end in graph.inputs}
    batches = {end.name: shapes[end.name] for end in graph.inputs_of("input")}
    nodes = {end.name: end.node for end in graph.inputs}
    for name, placements in of_inputs(parallel, batches).items():
        yield from (AxisCondition(nodes[name], axis, placement, text(axis, name)) for axis, placement in placements.items())
    for end in graph.inputs_of("parameter"):
        for axis, plan in parallel.items():
            placement = plan.parameter(end.name, shapes[end.name])
            if placement is not None:
                yield AxisCondition(end.node, axis, placement, text(axis, end.name), beside=plan.beside(end.name, shapes[end.name]))
            if plan.is_never_whole(end.name, shapes[end.name]):
                yield AxisCondition(end.node, axis, Replicate(), text(axis, end.name), forbidden=True)
    first = leading(parallel, batches.values())
    inputs = set(nodes.values())
    for module, calls in graph.returned.items():
        for node in dict.fromkeys(node for call in calls for node in call if node is not None and node not in inputs):
            shape = example_shape(graph.by_name[node].meta["val"].shape)
            for axis, plan in parallel.items():
                placement = plan.result(module, shape, first)
                if placement is not None:  # a view of flattened tokens, say, cannot be cut along the sequence; what reads it is
                    yield AxisCondition(node, axis, placement, text(axis, module), optional=plan.cut is not None)
                if plan.is_returned_whole(module):
                    yield AxisCondition(node, axis, Replicate(), text(axis, module), returned=True)


def warn_of_overruled(graph: PlanningGraph, said: Iterable[AxisCondition], held: Mapping[str, Layout], mesh: Mesh) -> None:
    """Logs for each word the parameters whose layouts, those of the DTensors that they are already, are others. ``held``: by node.

    A shard of a dim of one row, as ``fully_shard`` makes it where a word says Replicate, is not told.
    """
    names = {end.node: end.name for end in graph.inputs_of("parameter")}
    found: dict[str, dict[str, str]] = {}
    for one in said:
        placed = held[one.node][mesh.axis(one.axis)]
        dim = getattr(placed, "dim", None)
        if one.node in names and (dim is None or graph.by_name[one.node].meta["val"].shape[dim] != 1):
            found.setdefault(one.text, {})[one.node] = f"{names[one.node]} in {placement_str(placed)} on {one.axis}"
    for text, those in found.items():
        what = "%s does not count for parameters that are DTensors already (%d); their layouts hold unless pins= says otherwise: %s"
        log.warning(what, text, len(those), some(those.values(), 3))


def warn_of_unmatched(graph: PlanningGraph, parallel: Parallel, mesh: Mesh) -> None:
    """Logs the names in plans that match no module and no parameter of the graph, on axes of several ranks."""
    names = {*(end.name for end in graph.inputs_of("parameter")), *graph.aliases, *graph.returned}
    names |= {name.rpartition(".")[0] for name in names}
    for axis, plan in parallel.items():
        for glob in plan.unmatched(names) if mesh.shape[mesh.axis(axis)] > 1 else ():
            close = closest(glob, [*sorted(names), *sorted({name.rpartition(".")[2] for name in names})])
            log.warning("parallel[%r] names %r, which matches no module or parameter of the model%s", axis, glob, close)
