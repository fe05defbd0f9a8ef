"""The predicted timeline of a lowered program on one rank: compute, overlapped communication, and waits.

Operators, copies for collectives included, run in graph order at their roofline time (``cost.compute``). A collective
starts when its operand is ready and the axis' earlier collectives are done; the device continues until the collective's wait.
Overlap is not free: of communication hidden behind compute, the part ``Hardware.overlap`` is saved and the rest slows the device.
The timeline serves to compare two orders of one program; its length is not the plan's objective, which ignores order.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import lru_cache

from torch import fx

from fxshard._torch_compat import OpOverload
from fxshard.cost.collectives import ROWS, collective_time
from fxshard.cost.compute import compute_time
from fxshard.graph.call import Call, example_call
from fxshard.graph.planning_graph import VIEWS, example_shape, is_getitem
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import NODE_COLLECTIVES, OpSpec, node_collective_bytes
from fxshard.program.sharded_program import KINDS, ROOM, is_collective, is_wait
from fxshard.timeline import DEVICE, Event, Timeline


def timeline(nodes: Iterable[fx.Node], mesh: Mesh, same: Mapping[fx.Node, fx.Node] | None = None) -> Timeline:
    """The timeline of ``nodes`` of a local graph, in this order.

    ``same``: if ``nodes`` mix two graphs, maps a collective that a wait refers to onto the node that runs instead.
    """
    same = same or {}
    clock, free, ends = 0.0, dict.fromkeys(mesh.axis_names, 0.0), dict[fx.Node, int]()
    events: list[Event] = []
    busy = _BusyIntervals()
    for node in nodes:
        if is_collective(node):
            axis, took = str(node.args[-1]), communication_time(node, mesh)
            start = max(clock, free[axis])
            free[axis] = start + took
            ends[node] = len(events)
            events.append(Event(node.name, KINDS[node.target], axis, start, start + took))
        elif is_wait(node):
            begun = node.all_input_nodes[0]
            index = ends[same.get(begun, begun)]
            event, arrived = events[index], clock
            hidden = busy.between(event.start, min(arrived, event.end))
            clock = max(clock, event.end) + (1 - mesh.hardware.overlap) * hidden
            events[index] = event._replace(waited=clock - arrived)
        elif took := operator_time(node, mesh):
            events.append(Event(node.name, name_of(node.target), DEVICE, clock, clock + took))
            busy.add(clock, took)
            clock += took
    return Timeline(tuple(events), max([clock, *free.values()]))


class _BusyIntervals:
    """The intervals in which the device computes, in ascending order."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.lengths: list[float] = []
        self.before = [0.0]

    def add(self, start: float, took: float) -> None:
        self.starts.append(start)
        self.lengths.append(took)
        self.before.append(self.before[-1] + took)

    def until(self, time: float) -> float:
        """Microseconds of compute before ``time``."""
        k = bisect_right(self.starts, time)
        return self.before[k] if k == 0 else self.before[k - 1] + min(self.lengths[k - 1], time - self.starts[k - 1])

    def between(self, start: float, end: float) -> float:
        return max(0.0, self.until(end) - self.until(start))


def communication_time(node: fx.Node, mesh: Mesh) -> float:
    """Microseconds of a collective of a local graph."""
    axis = mesh.axis(str(node.args[-1]))
    return collective_time(KINDS[node.target], axis, bytes_sent(node, mesh.shape[axis]), mesh)


def bytes_sent(node: fx.Node, ranks: int) -> int:
    """Bytes that each of ``ranks`` ranks sends in a collective of a local graph, by the ring algorithm."""
    buffer = node.all_input_nodes[0].meta["val"]
    size = math.prod(example_shape(buffer.shape)) * buffer.element_size()
    kind = KINDS[node.target]
    if kind in NODE_COLLECTIVES:
        room = int(str(node.args[ROOM])) if kind in ROWS else 1
        return node_collective_bytes(kind, int(size), ranks, room)
    if kind == "all_reduce":
        return int(-(-2 * (ranks - 1) * size // ranks))
    return int((ranks - 1) * size // (1 if kind == "all_gather" else ranks))


TIME_KEY = "operator_time"
"""Key in ``node.meta`` that caches (mesh, microseconds); copies of a graph at the same sizes share it."""


def operator_time(node: fx.Node, mesh: Mesh) -> float:
    """Microseconds of an operator of a local graph, at its local shapes."""
    kept = node.meta.get(TIME_KEY)
    if kept is None or kept[0] is not mesh:
        kept = node.meta[TIME_KEY] = mesh, _operator_time(node, mesh)
    return kept[1]


def _operator_time(node: fx.Node, mesh: Mesh) -> float:
    if node.op != "call_function" or is_getitem(node) or not isinstance(node.target, OpOverload) or name_of(node.target) in VIEWS:
        return 0.0
    call = example_call(node)
    return unsharded_time(call, mesh) if call.is_hashable else unsharded_time.__wrapped__(call, mesh)


@lru_cache(maxsize=4096)
def unsharded_time(call: Call, mesh: Mesh) -> float:
    """Microseconds of an operator on whole tensors."""
    whole = Layout.replicated(mesh.ndim)
    return compute_time(call, OpSpec((whole,) * len(call.operands), (whole,) * len(call.outputs)), mesh)
