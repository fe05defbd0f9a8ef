"""partition: splits a local joint graph into forward and backward, with the same collectives in each half on every rank.

The graph of the first rank decides for all where a collective runs: in the forward if an output or a mutation needs it, else in the
backward. Which values are saved for the backward may differ between size classes: torch's minimum cut decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.fakes import storage_key
from fxshard._torch_compat.inductor.inductor import values_to_save
from fxshard.errors import PlanError
from fxshard.graph.planning_graph import ancestors, reached
from fxshard.passes.after_lowering.forward_backward import behind, returned
from fxshard.program.sharded_program import is_collective, is_wait


@dataclass(frozen=True)
class Partition:
    """``forward``: primals -> results, then saved values; ``backward``: kept primals, saved values, tangents -> gradients.

    ``kept_inputs``: indices of the forward's inputs that the backward reads; ``kept``: the number of saved values.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept_inputs: tuple[int, ...]
    kept: int


def partition(
    module: fx.GraphModule,
    results: int,
    tangents: Sequence[int],
    in_forward: Sequence[bool],
    in_order: bool = False,
    as_planned: bool = False,
) -> Partition:
    """Splits ``module``, whose first ``results`` results are the forward's.

    ``tangents``: indices of the placeholders that are tangents; ``in_forward``: see ``forward_collectives``. ``in_order``: see
    ``by_order``; nodes after the first user of a tangent that no result of the forward needs then run in the backward. ``as_planned``:
    saves exactly the values that the backward reads, and the bases of views; otherwise torch's minimum cut decides what to recompute.
    Renames the placeholders. Raises PlanError if the rank's graph cannot follow the program's decision.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    primals, late_inputs = _name_placeholders(graph, tangents)
    anchors = _CollectiveSplit(graph, in_forward)
    ends = [n for n in returned(graph)[results:] if isinstance(n, fx.Node)]
    first = ancestors([*(n for n in returned(graph)[:results] if isinstance(n, fx.Node)), *anchors.forward])
    ordered = behind(graph, late_inputs, first) if in_order else set()
    late = _dependents(graph, {*late_inputs, *anchors.backward, *ordered})
    crossing = next((n for n in first if n in late), None)
    if crossing is not None:
        raise PlanError(f"{crossing.name} is needed in the forward but can only run in the backward", remedy="please report it")
    kept = _saved_values(graph, primals, first, late, ends, anchors.backward, as_planned)
    first |= ancestors(kept)
    values = [n for n in kept if n.op != "placeholder"]
    inputs = [n for n in kept if n.op == "placeholder"]
    forward = _forward_graph(graph, primals, first, [*returned(graph)[:results], *values])
    backward = _backward_graph(graph, [*inputs, *values, *late_inputs], late, returned(graph)[results:])
    anchors.check(forward, backward)
    positions = {n: i for i, n in enumerate(primals)}
    return Partition(_module(forward), _module(backward), tuple(positions[n] for n in inputs), len(values))


class _CollectiveSplit:
    """Assigns each collective and its waits to a half, whether or not this rank reads the result."""

    def __init__(self, graph: fx.Graph, in_forward: Sequence[bool]) -> None:
        self.order = [n for n in graph.nodes if is_collective(n)]
        if len(self.order) != len(in_forward):
            raise PlanError(f"this rank issues {len(self.order)} collectives, others {len(in_forward)}", remedy="please report it")
        self.names = {True: [], False: []}  # type: dict[bool, list[str]]
        self.forward: list[fx.Node] = []
        self.backward: list[fx.Node] = []
        for node, early in zip(self.order, in_forward, strict=True):
            (self.forward if early else self.backward).extend([node, *(u for u in node.users if is_wait(u))])
            self.names[early].append(_signature(node))

    def check(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Raises PlanError unless each half issues its own collectives, once and in order."""
        for early, part in ((True, forward), (False, backward)):
            issued = [_signature(n) for n in part.nodes if is_collective(n)]
            if issued != self.names[early]:
                raise PlanError(f"partitioning changed the collectives: {issued} for {self.names[early]}", remedy="please report it")


def _signature(node: fx.Node) -> str:
    return f"{node.target}{node.args[1:]}{tuple(node.args[0].meta['val'].shape)}"


def _name_placeholders(graph: fx.Graph, tangents: Sequence[int]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(primals, tangents), named as torch's partitioner expects."""
    groups: dict[str, list[fx.Node]] = {"primals": [], "tangents": []}
    for i, node in enumerate([n for n in graph.nodes if n.op == "placeholder"]):
        kind = "tangents" if i in set(tangents) else "primals"
        groups[kind].append(node)
        node.name = node.target = f"{kind}_{len(groups[kind])}"
    return groups["primals"], groups["tangents"]


def _dependents(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """``late`` and all nodes that depend on it, without the output; updates ``late``."""
    for node in graph.nodes:
        if node.op != "output" and any(n in late for n in node.all_input_nodes):
            late.add(node)
    return late


def _saved_values(
    graph: fx.Graph,
    primals: list[fx.Node],
    first: set[fx.Node],
    late: set[fx.Node],
    ends: list[fx.Node],
    anchors: list[fx.Node],
    as_planned: bool,
) -> list[fx.Node]:
    """The values and inputs to save for the backward, in graph order: by torch's cut, or ``as_planned`` all that it reads."""
    wanted = [*ends, *anchors]
    if not wanted:
        return []
    for node in graph.nodes:
        if is_collective(node) or is_wait(node):
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    saved: set[fx.Node] = set()
    if as_planned:
        saved = {_base(n) for end in (*late, *ends) for n in (end, *end.all_input_nodes) if n not in late}
    elif any(n not in late for n in ancestors(wanted)):
        saved = set(values_to_save(graph, primals, first, late, ends))
    read = _operands_of(wanted, saved) | {n for n in primals if is_size(n)}
    return [n for n in graph.nodes if n in read and n not in late and (n in saved or n.op == "placeholder")]


def is_size(node: fx.Node) -> bool:
    """Whether an input is a size; both halves take all sizes, because each computes its own shapes."""
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)


def _base(node: fx.Node) -> fx.Node:
    """The base of a view, or the node itself."""
    while isinstance(value := node.meta.get("val"), torch.Tensor) and value.layout == torch.strided:
        above = (n for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), torch.Tensor) and t.layout == torch.strided)
        base = next((n for n in above if storage_key(n.meta["val"]) == storage_key(value)), None)
        if base is None:
            break
        node = base
    return node


def _operands_of(wanted: Iterable[fx.Node], stops: set[fx.Node]) -> set[fx.Node]:
    """``wanted`` and its transitive operands, without those of ``stops``, whose values are known."""
    return reached(wanted, lambda node: () if node in stops else node.all_input_nodes)


def _forward_graph(graph: fx.Graph, primals: list[fx.Node], first: set[fx.Node], results: Sequence[Any]) -> fx.Graph:
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in primals:
        env[node] = new.node_copy(node)
    for node in graph.nodes:
        if node in first and node not in env:
            env[node] = new.node_copy(node, env.__getitem__)
    new.output(fx.map_arg(tuple(results), env.__getitem__))
    return new


def _backward_graph(graph: fx.Graph, inputs: list[fx.Node], late: set[fx.Node], results: Sequence[Any]) -> fx.Graph:
    """The late nodes in their order; recomputed nodes come right before their first user."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        env[node] = new.placeholder(node.name)
        env[node].meta = dict(node.meta)
    needed = _operands_of([n for n in [*results, *(n for n in late if is_wait(n))] if isinstance(n, fx.Node)], set(env))
    for node in graph.nodes:
        if node in late and node in needed:
            _copy(new, env, node)
    for node in results:
        if isinstance(node, fx.Node):
            _copy(new, env, node)
    new.output(fx.map_arg(tuple(results), env.__getitem__))
    return new


def _copy(new: fx.Graph, env: dict[fx.Node, fx.Node], node: fx.Node) -> None:
    """Copies ``node`` and, before it, those of its transitive operands that are not copied yet."""
    todo = [node]
    while todo:
        top = todo[-1]
        missing = [n for n in top.all_input_nodes if n not in env]
        if missing and top not in env:
            todo.extend(missing)
            continue
        todo.pop()
        if top not in env:
            env[top] = new.node_copy(top, env.__getitem__)


def _module(graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)
