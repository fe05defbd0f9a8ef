"""The time of a step from its lowered graph: kernels one after the other, collectives exposed or beside them.

Gathers of parameters and reductions of gradients run while kernels run, one after the other; all other collectives are waited for. A gather
starts up to ``AHEAD`` parameters before its reader, a reduction has as long after its producer. Nothing here is from fxshard but the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from bench.quality.kernels import COLLECTIVES, IMBALANCE, base, copies, is_view, kind_of, size, times
from bench.quality.prices import OVERLAP, Device, collective_time, group_of

AHEAD = 8
"""Parameters of which the gathers may be under way (docs/how-the-plan-is-chosen.md)."""


@dataclass(frozen=True)
class Evaluated:
    """Microseconds of a step: of its kernels, of all its collectives, of those that kernels hide, and of copies that pack for collectives,
    which Inductor may fuse with a neighbour and do not count in ``total``."""

    compute: float
    communication: float
    hidden: float
    copies: float

    @property
    def total(self) -> float:
        """Hidden communication is free up to the part by which it slows kernels down."""
        return self.compute + self.communication - OVERLAP * self.hidden


@dataclass
class _Transfer:
    """A collective in the background, with the microseconds that remain."""

    left: float


@dataclass
class _Clock:
    """What runs beside kernels, in order; ``hidden``: what has run so far."""

    running: list[_Transfer] = field(default_factory=list)
    hidden: float = 0.0

    def compute(self, time: float) -> None:
        """Transfers progress, one after the other, while kernels run for ``time``."""
        for one in self.running:
            part = min(time, one.left)
            one.left, time, self.hidden = one.left - part, time - part, self.hidden + part
        self.running = [one for one in self.running if one.left > 0]

    def stop(self, one: _Transfer) -> None:
        """What remains of it is waited for."""
        one.left = 0.0


def evaluated(graph: fx.Graph, parameters: frozenset[str], mesh: Mapping[str, int], on: Device) -> Evaluated:
    """Of a rank's graph; ``parameters``: names of the placeholders that exist before the step."""
    nodes, kernels = list(graph.nodes), times(graph, on)
    moved = {node: _communication(node, mesh, on) for node in nodes if kind_of(node) in COLLECTIVES}
    early = {node for node in moved if _is_of_parameter(node, parameters)}
    late = {node for node in moved if node not in early and _is_returned(node)}
    borders = [k for k, node in enumerate(nodes) if _is_border(node, parameters, late)]
    starts, ends = _windows(nodes, borders, early, late)
    transfers, clock = {node: _Transfer(moved[node]) for node in early | late}, _Clock()
    for k, node in enumerate(nodes):
        for one in ends.get(k, ()):
            clock.stop(transfers[one])
        clock.running += [transfers[one] for one in starts.get(k, ())]
        clock.compute(kernels.get(node, 0.0))
    return Evaluated(sum(kernels.values()), sum(moved.values()), clock.hidden, copies(graph, on))


def _communication(node: fx.Node, mesh: Mapping[str, int], on: Device) -> float:
    kind, axis, operand = COLLECTIVES[kind_of(node)], str(node.args[-1]), node.all_input_nodes[0]
    group = group_of(tuple(mesh.values()), list(mesh).index(axis))
    buffer = float(size(node) if kind == "all_gather" else size(operand))
    if kind_of(node) in ("dispatch", "combine"):  # rows of experts: those of the busiest rank, of a buffer with room for more
        buffer *= IMBALANCE / int(str(node.args[4]))
    return collective_time(on, kind, group, buffer)


def _is_of_parameter(node: fx.Node, parameters: frozenset[str]) -> bool:
    """Whether it moves a parameter that nothing has computed with."""
    while node.op == "call_function" and (is_view(node) or kind_of(node) in COLLECTIVES or kind_of(node) in ("clone", "cat", "stack")):
        if not node.all_input_nodes:
            return False
        node = base(node.all_input_nodes[0])
    return node.op == "placeholder" and node.name in parameters


def _is_returned(node: fx.Node) -> bool:
    """Whether its result is only returned, perhaps after other collectives."""
    return all(
        one.op == "output" or ((is_view(one) or kind_of(one) in COLLECTIVES or kind_of(one) in ("clone", "cat")) and _is_returned(one))
        for one in node.users
    )


def _is_border(node: fx.Node, parameters: frozenset[str], late: set[fx.Node]) -> bool:
    """Whether it is a kernel that reads a parameter or makes a gradient that is reduced."""
    if node.op != "call_function" or is_view(node) or kind_of(node) in COLLECTIVES:
        return False
    reads = any(_is_of_parameter(one, parameters) for one in node.all_input_nodes)
    return reads or any(_leads_to(one, late) for one in node.users)


def _leads_to(node: fx.Node, late: set[fx.Node]) -> bool:
    return node in late or (is_view(node) and any(_leads_to(one, late) for one in node.users))


Places = dict[int, list[fx.Node]]


def _windows(nodes: list[fx.Node], borders: list[int], early: set[fx.Node], late: set[fx.Node]) -> tuple[Places, Places]:
    """Positions at which transfers may start, and at which they must be done."""
    starts, ends, passed = Places(), Places(), 0
    for k, node in enumerate(nodes):
        if node in early:
            start, end = borders[passed - AHEAD] if passed >= AHEAD else 0, k
        elif node in late:
            start, end = k, borders[passed + AHEAD] if passed + AHEAD < len(borders) else len(nodes) - 1
        if node in early or node in late:
            starts.setdefault(start, []).append(node)
            ends.setdefault(end, []).append(node)
        passed += passed < len(borders) and borders[passed] == k
    return starts, ends
