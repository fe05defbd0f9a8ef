"""Rematerialisation (activation checkpointing): activations of a block are recomputed in the backward instead of kept.

A block is one of several modules in a list (``layers.3``); its nodes are those between the result of the block before and its own. The
recomputed nodes are those that the backward reads and their inputs within the block; values that other blocks read in the forward are
kept. All recomputations run right before the first node of the backward that reads any of them (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard.errors import PlanError
from fxshard.graph.planning_graph import PlanningGraph, depends_on_run_time, outputs_of, producer, reached
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.lifetimes import Lifetimes, values_of
from fxshard.plans.plan_data import again as second_name

Recomputed = Mapping[str, tuple[str, ...]]
"""Block -> names of the nodes that are recomputed."""


@dataclass(frozen=True)
class Block:
    """``nodes`` may be recomputed, in graph order, right ``before`` the first node of the backward that reads any of them."""

    name: str
    nodes: tuple[fx.Node, ...]
    before: fx.Node


def blocks(times: Lifetimes, together: Iterable[Iterable[fx.Node]] = ()) -> tuple[Block, ...]:
    """The blocks of a graph with a backward, in graph order. Of each set of nodes in ``together``, all or none are recomputed."""
    others = {n for n in times.time if not times.in_backward(n)}
    found = []
    parts = [set(part) for part in together]
    for name, ends in _block_outputs(times):
        inside = _ancestors_inside(ends, others.__contains__)
        others -= inside
        nodes = _nodes_to_recompute(times, inside, [part for part in parts if part & inside])
        late = [r for n in nodes for r in _readers(times, n) if times.in_backward(r)]
        before = min(late, key=times.time.__getitem__, default=None)
        if (
            before is not None and times.time[before] > times.backward_start
        ):  # the last block would be recomputed right after it was computed
            found.append(Block(name, tuple(sorted(nodes, key=times.time.__getitem__)), before))
    return tuple(found)


def _block_outputs(times: Lifetimes) -> list[tuple[str, list[fx.Node]]]:
    """(name, nodes that it returns) of each call of a module in a list, in graph order. A module that is alone in its list is left out."""
    calls: list[tuple[str, list[fx.Node]]] = []
    names: dict[str, set[str]] = {}
    for name, made in times.graph.returned.items():
        parent, _, last = name.rpartition(".")
        if last.isdigit() and not any(part.isdigit() for part in parent.split(".")):
            names.setdefault(parent, set()).add(name)
            for k, call in enumerate(made):
                nodes = [producer(times.graph.by_name[n])[0] for n in call if n is not None and n in times.graph.by_name]
                nodes = [n for n in nodes if n.op == "call_function" and times.time[n] < times.backward_start]
                if nodes:
                    calls.append((name if len(made) == 1 else f"{name} (call {k})", nodes))
    alone = {name for alike in names.values() if len(alike) == 1 for name in alike}
    kept = [call for call in calls if re.sub(r" \(call \d+\)$", "", call[0]) not in alone]
    return sorted(kept, key=lambda call: max(map(times.time.__getitem__, call[1])))


def _ancestors_inside(ends: Iterable[fx.Node], inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes ``ends`` and their ancestors, as far as they are ``inside``; getitems count as their producers."""

    def kept(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [n for n in (producer(node)[0] for node in nodes) if n.op == "call_function" and inside(n)]

    return reached(kept(ends), lambda node: kept(node.all_input_nodes))


def _nodes_to_recompute(times: Lifetimes, inside: set[fx.Node], parts: Sequence[set[fx.Node]]) -> set[fx.Node]:
    """The nodes of a block to recompute: those that the backward reads, and their ancestors inside the block."""
    free = {n for n in inside if _is_deterministic(n) and all(r in inside or times.in_backward(r) for r in _readers(times, n))}
    while True:
        split = {n for part in parts if not part <= free for n in part}
        smaller = free - split - _bases(times, inside - free)
        if smaller == free:
            break
        free = smaller
    needed = _ancestors_inside((n for n in free if any(map(times.in_backward, _readers(times, n)))), free.__contains__)
    while True:
        whole = {n for part in parts if part & needed for n in part}
        if whole <= needed:
            return needed
        needed = _ancestors_inside(needed | whole, free.__contains__)


def _bases(times: Lifetimes, kept: Iterable[fx.Node]) -> set[fx.Node]:
    """The values whose memory the kept views share."""
    found: set[fx.Node] = set()
    for node in kept:
        while times.is_view(node) and node.all_input_nodes:
            node = producer(node.all_input_nodes[0])[0]
            found.add(node)
    return found


def _is_deterministic(node: fx.Node) -> bool:
    """Whether recomputing a node gives the same result. fxshard's random operators do, because they are functions of their seed."""
    tags = getattr(node.target, "tags", ())
    return bool(outputs_of(node)) and torch.Tag.nondeterministic_seeded not in tags and not depends_on_run_time(node)


def _readers(times: Lifetimes, node: fx.Node) -> list[fx.Node]:
    """The users of all values that a node produces."""
    return [r for v in values_of(node) for r in times.readers.get(v, ())]


def expand(graph: PlanningGraph, recomputed: Recomputed) -> PlanningGraph:
    """``graph`` with the nodes in ``recomputed`` duplicated for the backward. Raises PlanError if the graph does not allow it."""
    if not recomputed:
        return graph
    times = Lifetimes(graph)
    places: dict[int, list[fx.Node]] = {}
    for name, names in recomputed.items():
        nodes, at = _place(times, name, names)
        places.setdefault(at, []).extend(nodes)
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    again: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for one in places.get(times.time.get(node, -1), ()):
            again[one] = _copy(new, one, lambda n: again.get(n, env[n]), second_name(one.name))
        late = times.in_backward(producer(node)[0])
        env[node] = _copy(new, node, (lambda n: again.get(n, env[n])) if late else env.__getitem__, node.name)
    return dataclasses.replace(graph, module=fx.GraphModule(graph.module, new))


def _place(times: Lifetimes, block: str, names: Iterable[str]) -> tuple[list[fx.Node], int]:
    """(the nodes with their getitems, the time of their first reader in the backward)."""
    named = set(names)
    nodes = [n for n in times.graph.nodes if producer(n)[0].name in named]
    late = [times.time[r] for n in nodes for r in times.readers.get(n, ()) if times.in_backward(r)]
    early = all(n.op == "call_function" and not times.in_backward(producer(n)[0]) for n in nodes)
    if {producer(n)[0].name for n in nodes} != named or not late or not early:
        what = f"the plan computes nodes of {block} again that the backward of this model does not read"
        raise PlanError(what, where=f"{len(named)} nodes of {block}", remedy="plan again")
    return nodes, min(late)


def _copy(graph: fx.Graph, node: fx.Node, of: Any, name: str) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, node.kwargs), of)
    made = graph.create_node(node.op, node.target, args, kwargs, name=name, type_expr=node.type)
    if made.name != name:
        raise PlanError(f"a node of this graph is called {name} already", where=f"node {node.name}", remedy="please report it")
    made.meta = dict(node.meta)
    return made


def expanded(annotated: Annotated, recomputed: Recomputed) -> Annotated:
    """``expand`` for an annotated graph; the second copy of a node has the specs of the first."""
    if not recomputed:
        return annotated
    names = {second_name(name): name for nodes in recomputed.values() for name in nodes}
    return dataclasses.replace(
        annotated,
        graph=expand(annotated.graph, recomputed),
        specs={**annotated.specs, **{new: annotated.specs[old] for new, old in names.items()}},
        calls={**annotated.calls, **{new: annotated.calls[old] for new, old in names.items() if old in annotated.calls}},
        samples=tuple((weight, expanded(one, recomputed)) for weight, one in annotated.samples),
        largest=None if annotated.largest is None else expanded(annotated.largest, recomputed),
    )
