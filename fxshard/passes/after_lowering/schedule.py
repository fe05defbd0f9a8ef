"""schedule: issues each collective as early as its inputs allow and waits for it as late as its readers allow.

Each half of the step keeps its operators in order; two sweeps move collectives and light operators around them. The forward sweep moves
waits, and the cutting and joining of received tensors, right before the first operator that reads them. The backward sweep moves
collectives, and the packing of their input, right after the nodes that they need. A gather of a parameter needs nothing from the step; if
all gathers were issued first, they would fill the memory. So a gather is issued before its reader by its own duration plus that of the
gathers queued on its axis; if communication cannot be hidden (``Hardware.overlap`` is 0) it stays. The last reductions of gradients end
after the last operator.

The first rank's graph decides. A position is recorded as the place in the planning graph of the next operator, so that all ranks issue the
same collectives in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat.nodes import inputs_of
from fxshard.cost.timeline import communication_time, operator_time, timeline
from fxshard.graph.planning_graph import VIEWS
from fxshard.graph.targets import cached_by_target, name_of
from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.forward_backward import by_order, forward_nodes
from fxshard.passes.after_lowering.rewrite import rebuilt
from fxshard.program.sharded_program import ShardedProgram, is_collective, is_wait
from fxshard.timeline import Timeline

aten = torch.ops.aten

LIGHT = {aten.cat.default, aten.stack.default, aten.constant_pad_nd.default, aten.clone.default, aten._to_copy.default, aten.div.Tensor}
"""Operators emitted around collectives, besides views: they pack the input, and cut and join the result."""


@dataclass(frozen=True)
class IssuePoint:
    """Issue the ``number``-th collective of a local graph before the first operator whose turn is greater than ``turn``."""

    number: int
    turn: float


def schedule(program: ShardedProgram) -> ShardedProgram:
    """The program with its collectives moved; the same ones in the same order on all ranks."""
    reference = program.first.graph
    numbers = {n: k for k, n in enumerate(n for n in reference.nodes if is_collective(n))}
    forward, middle, backward = late = _parts_with_late_waits(program, reference)
    stay = [program.collectives[numbers[n]] for n in middle if is_collective(n)]
    begins = {0: _issue_points(forward, numbers, program.mesh), 2: _issue_points(backward, numbers, program.mesh)}
    modules = {}
    for size_class, module in program.modules.items():
        order = []
        collectives = [n for n in module.graph.nodes if is_collective(n)]
        for k, part in enumerate(late if module.graph is reference else _parts_with_late_waits(program, module.graph)):
            moves = [(collectives[b.number], b.turn) for b in begins.get(k, ())]
            order += with_collectives_at(part, moves) if k in begins else part
        modules[size_class] = rebuilt(module, order)
    moved = {k: [program.collectives[b.number] for b in found] for k, found in begins.items()}
    return program.with_modules(modules, [*moved[0], *stay, *moved[2]])


def predicted(program: ShardedProgram) -> Timeline:
    """The timeline of the first rank: the forward, then the backward; of dynamic sizes at those of the example (else ``program_at``)."""
    known: Timeline | None = program.cache.get("timeline")
    if known is None:
        graph = program.first.graph
        known = program.cache["timeline"] = timeline([n for part in parts(program, graph) for n in part], program.mesh)
    return known


def parts(program: ShardedProgram, graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls of the forward, those of the backward up to its first operator, and the rest, each in order.

    If the order decides where the backward begins, the middle part must not move: one of its nodes is the first to read a tangent. It has
    the same collectives on all ranks, although ranks with empty shards compute less before the first operator.
    """
    first, late = _halves(program, graph)
    if not by_order(program):
        return [first, [], late]
    others = [_halves(program, module.graph)[1] for module in program.modules.values()]
    most = max(sum(map(is_collective, nodes[: _until_heavy(nodes)])) for nodes in others)
    behind = [k + 1 for k, n in enumerate(late) if is_collective(n)][:most]
    pinned = max(_until_heavy(late), *behind[-1:], 0)
    return [first, late[:pinned], late[pinned:]]


def _halves(program: ShardedProgram, graph: fx.Graph) -> tuple[list[fx.Node], list[fx.Node]]:
    calls = [n for n in graph.nodes if n.op == "call_function"]
    first = forward_nodes(program, graph)
    return [n for n in calls if n in first], [n for n in calls if n not in first]


def _until_heavy(late: Sequence[fx.Node]) -> int:
    return next((k + 1 for k, n in enumerate(late) if not (is_collective(n) or is_wait(n) or is_light(n))), len(late))


def _parts_with_late_waits(program: ShardedProgram, graph: fx.Graph) -> list[list[fx.Node]]:
    """The three parts, with waits moved late in the first and last."""
    forward, stay, backward = parts(program, graph)
    return [delay_waits(forward), stay, delay_waits(backward)]


def delay_waits(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Moves waits, and light operators that read only moved nodes, right before their first other reader."""
    put_off: dict[fx.Node, None] = {}
    order: list[fx.Node] = []
    here = set(nodes)

    def place(node: fx.Node) -> None:
        for operand in inputs_of(node):
            if operand in put_off:
                del put_off[operand]
                place(operand)
        order.append(node)

    for node in nodes:
        if is_wait(node) or (is_light(node) and (read := here.intersection(inputs_of(node))) and all(n in put_off for n in read)):
            put_off[node] = None
        else:
            place(node)
    for node in list(put_off):
        if node in put_off:
            del put_off[node]
            place(node)
    return order


def _issue_points(nodes: Sequence[fx.Node], numbers: dict[fx.Node, int], mesh: Mesh) -> list[IssuePoint]:
    """The new positions of the collectives among ``nodes`` of the first rank's graph, in order."""
    turn, found = -1.0, []
    for node in advance_collectives(nodes, mesh):
        if is_collective(node):
            found.append(IssuePoint(numbers[node], turn))
        elif not is_wait(node) and not is_light(node):
            turn = max(turn, node.meta["turn"])
    return found


def advance_collectives(nodes: Sequence[fx.Node], mesh: Mesh) -> list[fx.Node]:
    """Moves collectives, and light operators that only these read, right after the nodes that they need, or ahead of their readers by the
    time that they take."""
    left = _Pending()
    order: list[fx.Node] = []
    given = _from_inputs_only(nodes)

    def settle(node: fx.Node) -> None:
        if node in left.nodes:
            left.remove(node)
            for user in node.users:
                settle(user)
            order.append(node)

    for node in reversed(nodes):
        if is_collective(node):
            hidden = communication_time(node, mesh) + left.queued(node.args[-1]) if mesh.hardware.overlap else 0.0
            left.add(node, hidden if node in given else math.inf)
        elif is_light(node) and node.users and all(user in left.nodes for user in node.users):
            left.add(node, max(left.timed.get(user, math.inf) for user in node.users))
        else:
            for user in node.users:
                settle(user)
            order.append(node)
            left.compute(operator_time(node, mesh))
        for other in left.due():
            settle(other)
    for node in list(left.nodes):
        settle(node)
    return order[::-1]


class _Pending:
    """``nodes`` that are still to be moved earlier. ``timed``: for some, the microseconds of compute still to place after them; the others,
    which may be many, move right after the nodes that they need."""

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, None] = {}
        self.timed: dict[fx.Node, float] = {}
        self.untimed: Counter[Any] = Counter()  # collectives, by axis

    def add(self, node: fx.Node, time: float) -> None:
        self.nodes[node] = None
        if time < math.inf:
            self.timed[node] = time
        elif is_collective(node):
            self.untimed[node.args[-1]] += 1

    def remove(self, node: fx.Node) -> None:
        del self.nodes[node]
        if self.timed.pop(node, None) is None and is_collective(node):
            self.untimed[node.args[-1]] -= 1

    def queued(self, axis: Any) -> float:
        """Microseconds for which the pending collectives occupy an axis."""
        if self.untimed[axis]:
            return math.inf
        return sum(time for other, time in self.timed.items() if is_collective(other) and other.args[-1] == axis)

    def compute(self, took: float) -> None:
        for node in self.timed:
            self.timed[node] -= took

    def due(self) -> list[fx.Node]:
        return [node for node, time in self.timed.items() if time <= 0]


def with_collectives_at(nodes: Sequence[fx.Node], begins: Sequence[tuple[fx.Node, float]]) -> list[fx.Node]:
    """``nodes`` with each (collective, turn) of ``begins`` moved to its position, in that order, with the operands that it needs."""
    moved = {node for node, _ in begins}
    order: dict[fx.Node, None] = {}
    here = set(nodes)
    waiting = list(begins)
    last = max((k for k, n in enumerate(nodes) if not (n in moved or is_wait(n) or is_light(n))), default=-1)

    def place(node: fx.Node) -> None:
        while node in moved and node not in order:  # earlier collectives are issued first
            put(waiting.pop(0)[0])
        put(node)

    def put(node: fx.Node) -> None:
        if node in here and node not in order:
            for operand in inputs_of(node):
                place(operand)
            order[node] = None

    for k, node in enumerate(nodes):
        if k > last:
            break
        if is_wait(node) or is_light(node):
            packing = bool(node.users) and all(user in moved and user not in order for user in node.users)
        else:
            packing = False
            while waiting and node not in moved and waiting[0][1] < node.meta["turn"]:
                place(waiting[0][0])
        if node not in moved and not packing:
            place(node)
    for node in [*[c for c, _ in waiting], *nodes]:
        place(node)
    return list(order)


def _from_inputs_only(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on inputs alone, through light operators and collectives."""
    found: set[fx.Node] = set()
    for node in nodes:
        made = is_collective(node) or is_wait(node) or is_light(node)
        if made and all(n.op == "placeholder" or n in found for n in inputs_of(node)):
            found.add(node)
    return found


def is_light(node: fx.Node) -> bool:
    """Whether the operator only packs, cuts or joins."""
    return _is_light(node.target)


@cached_by_target
def _is_light(target: Any) -> bool:
    return target in LIGHT or name_of(target) in VIEWS
