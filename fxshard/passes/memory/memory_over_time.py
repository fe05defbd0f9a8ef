"""The allocations of a plan over time: they give its reported memory and decide whether it keeps a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import fx

from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import plain_shape, producer
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import Lifetimes, Span, shard_bytes, values_of
from fxshard.passes.memory import workspace
from fxshard.passes.memory.offload import PLACES, shard_and_state, staged_bytes
from fxshard.plans.offload import PARAMETERS
from fxshard.plans.plan_data import OpSpec, Redistribution
from fxshard.solver import Timeline


@dataclass(frozen=True)
class Allocation:
    """One allocation: its value, kind (one of ``memory_profile.KINDS``), span, bytes and layout.

    ``layout``: None for the workspace of a node or redistribution.
    """

    value: str
    kind: str
    span: Span
    bytes: int
    layout: Layout | None = None


def allocations(
    times: Lifetimes,
    specs: Mapping[str, OpSpec],
    moves: Sequence[Redistribution],
    mesh: Mesh,
    optimizer: Optimizer,
    on_host: Mapping[str, str] = MappingProxyType({}),
) -> list[Allocation]:
    """The allocations of a plan. A value that is read only in other layouts dies once it is redistributed to them.

    ``on_host``: as in ``PlanData``. The optimiser's step counts at the time of the output: it copies what is on the host to the device.
    """
    found, staged = [], 0
    entries: dict[str, list[Redistribution]] = {}
    for move in moves:
        entries.setdefault(move.value, []).append(move)
    for value in times.values:
        source, index = producer(value)
        kind, have = times.kind(value), specs[source.name].outputs[index]
        if not times.is_view(source):
            size = _bytes(value, have, mesh)
            given = source.op == "placeholder"
            spans = [times.own_span(value) if given else (times.born(value), _until(value, times, entries, specs))]
            if on_host.get(value.name) == PARAMETERS:
                spans = [span for late in (False, True) for span in _fetched(value, late, times, entries, specs)]
            found += [Allocation(value.name, kind, span, size, have) for span in spans]
            state = shard_and_state(value, have, mesh, optimizer)[1] if value.name in times.trained else 0
            if value.name in on_host and value.name in times.trained:
                staged = max(staged, staged_bytes(value, have, PLACES[on_host[value.name]], mesh, optimizer))
            elif state:
                found.append(Allocation(value.name, "optimizer", (0, times.end), state, have))
        mine = entries.get(value.name, [])
        for entry in mine:
            returned = entry.readers and all(reader == "output" for reader, _ in entry.readers)
            why = kind if returned else "gathered" if any(step.is_collective for step in entry.steps) else "temporary"
            span = _copy_span(value, entry, times, entries, specs)
            meanwhile, excess = workspace.of_move(value.meta["val"], entry.source, entry.steps, mesh)
            found.append(Allocation(value.name, why, span, _bytes(value, entry.target, mesh) + excess, entry.target))
            found.append(Allocation(value.name, "temporary", (span[0], span[0] + 1), meanwhile))
    for node, time in times.time.items():
        bytes_ = times.workspaces((node.name, mesh.shape), (specs[node.name],), partial(_workspace, node, specs[node.name], times, mesh))
        found.append(Allocation(node.name, "temporary", (time, time + 1), bytes_))
    if staged:
        found.append(Allocation("output", "temporary", (times.end - 1, times.end), staged))
    return found


def _workspace(node: fx.Node, spec: OpSpec, times: Lifetimes, mesh: Mesh) -> int:
    return round(float(workspace.of_node(node, [spec], times.last_uses(node), mesh)[0])) if workspace.may_need(node) else 0


Entries = Mapping[str, Sequence[Redistribution]]


def _fetched(value: fx.Node, late: bool, times: Lifetimes, entries: Entries, specs: Mapping[str, OpSpec]) -> list[Span]:
    """The span of the copy of a parameter on the host that the forward, or the backward if ``late``, makes; none if it does not read it."""
    readers = [r for r in times.readers.get(value, ()) if times.in_backward(r) is late]
    if not readers:
        return []
    moves = [entry for entry in entries.get(value.name, ()) if any(times.in_backward(r) is late for r in _readers(entry, times))]
    moved = {reader for entry in moves for reader in entry.readers}
    plain = [r for r in readers if any(o is value and (r.name, k) not in moved for k, o in enumerate(times.operands[r]))]
    ends = [_start(value, entry, times) + 1 for entry in moves]
    return [(min(times.time[r] for r in readers), max([*ends, *(_read_until(value, r, times, entries, specs) for r in plain)]))]


def _until(value: fx.Node, times: Lifetimes, entries: Entries, specs: Mapping[str, OpSpec]) -> int:
    """When a value is no longer needed in the layout in which it is produced."""
    source, index = producer(value)
    moves, have = entries.get(value.name, ()), specs[source.name].outputs[index]
    if not moves:
        return max((times.born(value) + 1, *(_read_until(value, r, times, entries, specs) for r in times.readers.get(value, ()))))
    moved = {reader for entry in moves for reader in entry.readers}
    ends = [times.born(value) + 1]
    ends += [_start(value, entry, times) + 1 for entry in moves if entry.source == have]
    for reader in times.readers.get(value, []):
        if any(o is value and (reader.name, k) not in moved for k, o in enumerate(times.operands[reader])):
            ends.append(_read_until(value, reader, times, entries, specs))
    return max(ends)


def _read_until(value: fx.Node, reader: fx.Node, times: Lifetimes, entries: Entries, specs: Mapping[str, OpSpec]) -> int:
    """When a reader no longer needs what it reads; for a view, when its result is no longer needed as it is."""
    views = values_of(reader) if times.is_view(reader) else []
    return max((_until(v, times, entries, specs) for v in views), default=times.read_until(value, reader))


def _start(value: fx.Node, entry: Redistribution, times: Lifetimes) -> int:
    """When a redistribution runs: at its first reader; if it is ``ahead``, at the first reader of the value."""
    if entry.ahead:
        return min(times.time[r] for r in times.readers[value])
    return times.copy_span(value, _readers(entry, times))[0] if entry.readers else times.end


def _readers(entry: Redistribution, times: Lifetimes) -> list[fx.Node]:
    return [times.graph.by_name[name] for name, _ in entry.readers]


def _copy_span(value: fx.Node, entry: Redistribution, times: Lifetimes, entries: Entries, specs: Mapping[str, OpSpec]) -> Span:
    """The span of a redistribution's result: until its readers, and the redistributions that start from it, are done."""
    source, index = producer(value)
    have = specs[source.name].outputs[index]
    ends = [_read_until(value, reader, times, entries, specs) for reader in _readers(entry, times)]
    if entry.source == have:
        ends += [_start(value, one, times) + 1 for one in entries[value.name] if one.source == entry.target and one.source != have]
    return _start(value, entry, times), max(ends, default=0)


def total_over_time(allocated: Sequence[Allocation]) -> Timeline:
    """Total bytes over time."""
    return Timeline.of([one.span for one in allocated], [one.bytes for one in allocated])


def _bytes(value: fx.Node, layout: Layout | None, mesh: Mesh) -> int:
    assert layout is not None
    tensor = value.meta["val"]
    return shard_bytes(plain_shape(tensor.shape), tensor.dtype.itemsize, layout, mesh.shape)
