"""chunk: splits a matrix product and the adjacent collective into pieces, so that one is computed while another is sent (async tensor
parallelism).

A dim of the collective's buffer is cut. Each piece of its input is sent as soon as it is computed; each piece of its result is multiplied
while the next is in flight. The pass searches for operators that can run piecewise (``cut_candidates``): backwards from the buffer to
products whose results have no other reader, and forwards from the result through light operators to products. Other readers get the joined
pieces.

The first rank's graph decides: each possible cut is tried on a window around the collective, and the cost model's timeline picks the
shortest. The collective's buffer has the same shape on all ranks, so all of them can cut it; a rank whose shards are too short for
piecewise operators sends pieces of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.nodes import inputs_of
from fxshard.cost.collectives import collective_time
from fxshard.cost.compute import traffic_time
from fxshard.cost.timeline import communication_time, operator_time, timeline
from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.cut_candidates import PRODUCT, Cuts, Halves, collective_cuts, producers, readers
from fxshard.passes.after_lowering.cut_pieces import Pieces, dense
from fxshard.passes.after_lowering.rewrite import Emitter, copied
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.program.sharded_program import KINDS, ProgramCollective, ShardedProgram, is_collective, is_wait

COUNTS = (2, 4, 8)
"""Numbers of pieces that are tried."""
CONTEXT = 12
"""Collectives with equal exposed time and equal operators within this distance share a decision."""
MARGIN = 64
"""Number of operators before and after the window that are simulated too, for the communication that overlaps with them."""
FAR = 256
"""With more operators than this between a collective and its wait, or in the window, there is enough compute beside it: it is not cut."""


@dataclass(frozen=True)
class Choice:
    """Cut a collective into ``count`` pieces along ``dim`` of its buffer."""

    dim: int
    count: int


def chunk(program: ShardedProgram) -> ShardedProgram:
    """The program with collectives cut where that is faster; the same ones on all ranks."""
    found = choices(program)
    return cut_program(program, found) if found else program


def cut_program(program: ShardedProgram, found: dict[int, Choice]) -> ShardedProgram:
    """Cuts collectives, by number; the dim of each must have at least ``count`` elements (``cut_candidates.collective_cuts``)."""
    issued = list[ProgramCollective]()
    modules = {}
    for size_class, module in program.modules.items():
        copy = copied(module)
        halves = Halves.of(program, copy.graph)
        begun = [split_collective(copy.graph, n, found.get(k), halves) for k, n in enumerate([*filter(is_collective, copy.graph.nodes)])]
        modules[size_class] = copy
        if size_class == program.classes[program.origin]:
            issued = [p for c, nodes in zip(program.collectives, begun, strict=True) for p in _issued(c, nodes)]
    return program.with_modules(modules, issued)


def _issued(one: ProgramCollective, nodes: Sequence[fx.Node]) -> list[ProgramCollective]:
    """The records of the pieces of a collective; their bytes add up to the original's."""
    buffers = [n.all_input_nodes[0].meta["val"] for n in nodes]
    parts, before, total = [], 0, sum(b.numel() for b in buffers)
    for node, buffer in zip(nodes, buffers, strict=True):
        behind = before + buffer.numel()
        sent = one.bytes * behind // total - one.bytes * before // total if total else one.bytes
        parts.append(replace(one, bytes=sent, shape=tuple(buffer.shape), node=node.name))
        before = behind
    return parts


def split_collective(graph: fx.Graph, node: fx.Node, choice: Choice | None, halves: Halves) -> list[fx.Node]:
    """Replaces a collective and the piecewise operators around it by their pieces; returns the new collectives."""
    cuts = collective_cuts(node, choice.dim, choice.count) if choice else None
    if choice is None or cuts is None:
        return [node]
    (buffer,), (wait,) = node.all_input_nodes, node.users
    before = producers(node, cuts[0], choice.count, halves)
    behind = readers(wait, cuts[1], choice.count, halves) or {wait: cuts[1]}
    emit, pieces, begun = Emitter(graph, node, half=halves.first), Pieces(before), []
    for k in range(choice.count):
        sent = dense(emit, pieces(emit, buffer, cuts[0], k))
        begun.append(emit(node.target, sent, *node.args[1:]))
    _emit_result_side(graph, Pieces(behind, {wait: begun}), choice.count, halves)
    for old in sorted({*before, node, *behind}, reverse=True):
        graph.erase_node(old)
    return begun


def _emit_result_side(graph: fx.Graph, pieces: Pieces, count: int, halves: Halves) -> None:
    """Emits products piece by piece at the first product, and joins pieces right before other readers need them.

    A tensor that only the other half of the step reads is joined in that half, after the products.
    """
    products = [n for n in sorted(pieces.cuts) if n.target is PRODUCT]
    outside = {n: [u for u in n.users if u not in pieces.cuts] for n in pieces.cuts}

    def place_of(node: fx.Node, first: fx.Node) -> fx.Node:
        if node in products or not (products or halves.together(node, first)):
            return node
        return first if halves.together(node, first) else products[0]

    joins = sorted((place_of(node, min(users)), node) for node, users in outside.items() if users)
    waiting = products
    for place, node in joins:
        if waiting and not place < waiting[0]:
            emit = Emitter(graph, waiting[0], half=halves.first)
            for k in range(count):
                for product in waiting:
                    pieces(emit, product, pieces.cuts[product], k)
            waiting = []
        whole = pieces.whole(Emitter(graph, place, half=halves.first), node)
        for user in outside[node]:
            user.replace_input_with(node, whole)
    for wait in pieces.arriving:  # on a rank where nobody reads it
        for k in range(count):
            pieces(Emitter(graph, wait, half=halves.first), wait, pieces.cuts[wait], k)


def choices(program: ShardedProgram) -> dict[int, Choice]:
    """The cut of each collective, by number, that shortens the first rank's timeline."""
    mesh = program.mesh
    if mesh.hardware.overlap == 0:
        return {}
    waited = {e.name: e.waited for e in predicted(program).events}
    graph = program.first.graph
    halves = Halves.of(program, graph)
    nodes = list(graph.nodes)
    places = {n: i for i, n in enumerate(nodes)}
    fingerprints = [_fingerprint(n, places) for n in nodes]
    known: dict[Any, Choice | None] = {}
    found: dict[int, Choice] = {}
    taken = set[fx.Node]()
    for k, node in enumerate(n for n in nodes if is_collective(n)):
        (wait,) = node.users
        start, stop = places[node], places[wait]
        if waited[node.name] * mesh.hardware.overlap <= _start(node, mesh) or stop - start > FAR:
            continue
        first = max(0, start - CONTEXT)
        key = float(f"{waited[node.name]:.1e}"), start - first, stop - start, tuple(fingerprints[first : stop + CONTEXT])
        if key not in known:
            known[key] = _best(nodes, places, node, waited[node.name], mesh, halves)
        choice = known[key]
        if choice is not None:
            inside = {n for cuts in _surrounding_cuts(node, choice, halves) for n in cuts}
            if taken.isdisjoint(inside):
                found[k] = choice
                taken |= inside
    return found


def _fingerprint(node: fx.Node, places: dict[fx.Node, int]) -> int:
    """A hash of an operator: target, shape and dtype of the result, axis of a collective, distance to nearby operands."""
    value = node.meta.get("val")
    shape = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
    back = (places[node] - places[o] for o in inputs_of(node))
    link = node.args[-1] if is_collective(node) else None
    return hash((node.target if node.op == "call_function" else node.op, shape, link, *(far if far < CONTEXT else CONTEXT for far in back)))


def _start(node: fx.Node, mesh: Mesh) -> float:
    """Microseconds that one more collective costs."""
    return collective_time(KINDS[node.target], mesh.axis(str(node.args[-1])), 0, mesh)


def _surrounding_cuts(node: fx.Node, choice: Choice, halves: Halves) -> tuple[Cuts, Cuts]:
    cuts = collective_cuts(node, choice.dim, choice.count)
    if cuts is None:
        return {}, {}
    (wait,) = node.users
    return producers(node, cuts[0], choice.count, halves), readers(wait, cuts[1], choice.count, halves)


def _best(nodes: Sequence[fx.Node], places: dict[fx.Node, int], node: fx.Node, waited: float, mesh: Mesh, halves: Halves) -> Choice | None:
    """The cut that shortens the window around a collective most, None if none does; for each dim only the most promising count is tried.

    The surrounding operators are found for the smallest count. With more pieces, fewer operators may qualify; simulating the window shows
    it.
    """
    best, least = None, 0.0
    for dim in range(node.all_input_nodes[0].meta["val"].ndim):
        around = _surrounding_cuts(node, Choice(dim, COUNTS[0]), halves)
        bounds = {count: min(waited, _bound(node, around, count, mesh)) for count in COUNTS}
        count = max(COUNTS, key=bounds.__getitem__)
        bound = bounds[count] - _joining(node, around[1], mesh)
        if bound > least:
            choice = Choice(dim, count)
            gain = _gain(nodes, places, node, choice, mesh, halves)
            best, least = (choice, gain) if gain > least else (best, least)
    return best


def _bound(node: fx.Node, around: tuple[Cuts, Cuts], count: int, mesh: Mesh) -> float:
    """An upper bound on the saved microseconds: the first piece of one and the last piece of the other do not overlap, and
    each further piece is launched."""
    products = sum(operator_time(n, mesh) for cuts in around for n in cuts if n.target is PRODUCT)
    sending, more = communication_time(node, mesh), (count - 1) * _start(node, mesh)
    return products + sending - max(products + (sending + more) / count, products / count + sending + more)


def _joining(node: fx.Node, behind: Cuts, mesh: Mesh) -> float:
    """Microseconds to join what other nodes read whole."""
    joined = [n.meta["val"] for n in behind or node.users if any(user not in behind for user in n.users)]
    return sum(traffic_time(mesh.hardware, 2 * v.numel() * v.element_size()) for v in joined)


def _gain(
    nodes: Sequence[fx.Node],
    places: dict[fx.Node, int],
    node: fx.Node,
    choice: Choice,
    mesh: Mesh,
    halves: Halves,
) -> float:
    """Microseconds saved in the window of operators around a collective, counting a launch for each operator."""
    reach = [places[n] for cuts in _surrounding_cuts(node, choice, halves) for n in (node, *node.users, *cuts)]
    start, stop = min(reach), max(reach) + 1
    if stop - start > FAR:
        return 0.0
    window, early, late = nodes[start:stop], nodes[max(0, start - MARGIN) : start], nodes[stop : stop + MARGIN]
    graph, copies = _window(window)
    split_collective(graph, copies[node], choice, Halves({copies[n] for n in window if n in halves.first}))
    pieces = [n for n in graph.nodes if n.op == "call_function"]
    same = {n: copies[n] for n in window} | {copies[n]: n for n in early if n in copies}
    return _cost([*early, *window, *late], mesh, {}) - _cost([*early, *pieces, *late], mesh, same)


def _window(window: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of these nodes alone: outside operands become inputs, values with outside users become outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inside = set(window)
    for given in dict.fromkeys(o for n in window for o in n.all_input_nodes if o not in inside):
        copies[given] = graph.placeholder(given.name)
        copies[given].meta = given.meta
    for node in window:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in window if any(user not in inside for user in n.users)))
    return graph, copies


def _cost(nodes: Sequence[fx.Node], mesh: Mesh, same: Mapping[fx.Node, fx.Node]) -> float:
    """Microseconds of operators, each with its own launch; collectives that begin before these nodes or are waited for after them do not
    count."""
    begun = {n: same.get(b := n.all_input_nodes[0], b) for n in nodes if is_wait(n)}
    here = {n for n in nodes if is_collective(n)}
    whole = here.intersection(begun.values())
    kept = [n for n in nodes if (begun[n] in whole if is_wait(n) else n in whole or not is_collective(n))]
    kernels = sum(1 for n in kept if not is_wait(n) and operator_time(n, mesh) > 0)
    return timeline(kept, mesh, same).total + kernels * mesh.hardware.launch
