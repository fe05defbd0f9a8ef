"""bucket: merges small collectives of one kind, axis and dtype where packing costs less than launching them separately.

Collectives can merge if none depends on another. The merged one is issued at the last member if nobody reads a result before (gradients),
or at the first member if the inputs of the others are available there (parameters). Each rank sends the same bytes, and results are
unchanged: the buffers are concatenated rank by rank. A collective that takes longer to pack and unpack than a launch and its hops is not
merged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxshard.cost.collectives import FULL_BUCKET_LATENCIES, collective_time, packing_time
from fxshard.cost.timeline import operator_time
from fxshard.graph.planning_graph import reached
from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.forward_backward import forward_nodes
from fxshard.passes.after_lowering.rewrite import Emitter, copied
from fxshard.passes.after_lowering.schedule import is_light
from fxshard.passes.lowering.shaping import is_dense, surely_within
from fxshard.program.sharded_program import KINDS, ProgramCollective, ShardedProgram, is_collective

aten = torch.ops.aten
REDUCING = ("all_reduce", "reduce_scatter")


@dataclass
class Bucket:
    """Numbers of the collectives to merge; ``early``: issue at the first member, else at the last."""

    members: list[int]
    early: bool = False


def bucket(program: ShardedProgram) -> ShardedProgram:
    """The program with merged collectives; the same on all ranks."""
    found = [b for b in buckets(program) if len(b.members) > 1]
    if not found:
        return program
    modules = {}
    for size_class, module in program.modules.items():
        copy = copied(module)
        _insert(copy.graph, found)
        modules[size_class] = copy
    joined = {k: b for b in found for k in b.members}
    issued = []
    names = [n.name for n in modules[program.classes[program.origin]].graph.nodes if is_collective(n)]
    places = {b.members[0] if b.early else b.members[-1]: b for b in found}
    for k, one in enumerate(program.collectives):
        if k in places:
            issued.append(_merged_record([program.collectives[m] for m in places[k].members]))
        elif k not in joined:
            issued.append(one)
    named = [replace(c, node=name) for c, name in zip(issued, names, strict=True)]
    return program.with_modules(modules, named)


def _merged_record(parts: Sequence[ProgramCollective]) -> ProgramCollective:
    """The record of the merged collective: the sum of bytes, everything that ``parts`` serve, one buffer."""
    first = parts[0]
    return replace(
        first,
        bytes=sum(p.bytes for p in parts),
        shape=_packed_shape(first.kind, [p.shape for p in parts]),
        serves=tuple(pair for p in parts for pair in p.serves),
    )


def buckets(program: ShardedProgram) -> list[Bucket]:
    """The collectives to merge, chosen on the first rank's graph such that all ranks can merge them."""
    graphs = [_Collectives([n for n in module.graph.nodes if is_collective(n)]) for module in program.modules.values()]
    reference = program.first.graph
    first = forward_nodes(program, reference)
    began = _compute_before(reference, program.mesh)
    current: dict[Any, Bucket] = {}
    found: list[Bucket] = []
    for k, node in enumerate(n for n in reference.nodes if is_collective(n)):
        one = program.collectives[k]
        if not _is_worth_merging(program, one):
            continue
        key = (node in first, one.kind, one.axis, one.dtype, _form(one, node))
        into = current.get(key)
        if into is None or _is_full(program, into) or not _join(program, graphs, into, k, began):
            current[key] = Bucket([k])
            found.append(current[key])
    return found


def _form(one: ProgramCollective, node: fx.Node) -> Any:
    """What members of a bucket must have in common besides: the reduction, or the rows of an all-to-all and how many go to each rank."""
    if one.kind == "all_to_all":
        return one.shape[0], *map(tuple, node.args[1:3])
    return node.args[1] if one.kind in REDUCING else None


def _is_worth_merging(program: ShardedProgram, one: ProgramCollective) -> bool:
    """Whether a collective costs more to launch than to pack and, if its result is in pieces, unpack."""
    if one.kind in ("zigzag", "dispatch", "combine"):  # halves are rare, and not worth a way to pack them; rows have counts of their own
        return False
    axis = program.mesh.axis(one.axis)
    return packing_time(one.kind, axis, one.bytes, program.mesh) < collective_time(one.kind, axis, 0, program.mesh)


def _is_full(program: ShardedProgram, into: Bucket) -> bool:
    """Whether the bucket takes so long to send that another launch hardly matters."""
    first, mesh = program.collectives[into.members[0]], program.mesh
    axis, sent = mesh.axis(first.axis), sum(program.collectives[m].bytes for m in into.members)
    return collective_time(first.kind, axis, sent, mesh) > FULL_BUCKET_LATENCIES * collective_time(first.kind, axis, 0, mesh)


def _compute_before(graph: fx.Graph, mesh: Mesh) -> list[float]:
    """For each collective, the microseconds of compute before it."""
    clock, found = 0.0, []
    for node in graph.nodes:
        if is_collective(node):
            found.append(clock)
        else:
            clock += operator_time(node, mesh)
    return found


def _delays(program: ShardedProgram, into: Bucket, k: int, early: bool, began: Sequence[float]) -> bool:
    """Whether waiting for the ``k``-th collective (for its issue, unless ``early``, and for its arrival) may expose more communication than
    a launch takes."""
    one, mesh = program.collectives[k], program.mesh
    axis = mesh.axis(one.axis)
    start = collective_time(one.kind, axis, 0, mesh)
    late = collective_time(one.kind, axis, one.bytes, mesh) - start + (0.0 if early else began[k] - began[into.members[0]])
    return mesh.hardware.overlap * late > start


def _join(program: ShardedProgram, graphs: Sequence[_Collectives], into: Bucket, k: int, began: Sequence[float]) -> bool:
    """Adds the ``k``-th collective to a bucket if all ranks can and it saves time."""
    taken = {pair for m in into.members for pair in program.collectives[m].serves}
    if taken & set(program.collectives[k].serves):  # pieces of one step that chunk separated
        return False
    members = [*into.members, k]
    for early in (False, True):
        if len(into.members) > 1 and early != into.early:
            continue
        if _delays(program, into, k, early, began):
            continue
        if all(g.may_be_early(members) if early else g.may_be_late(members) for g in graphs):
            into.members, into.early = members, early
            return True
    return False


@dataclass(frozen=True)
class _Collectives:
    """The collectives of a local graph, by number, and where they may move. Nodes compare by their position in the graph."""

    nodes: Sequence[fx.Node]

    def may_be_late(self, members: Sequence[int]) -> bool:
        """Whether nobody reads a member's result before the last one is issued."""
        last, readers = self.nodes[members[-1]], [_readers(self.nodes[m]) for m in members]
        return all(readers) and all(last < reader for found in readers for reader in found)

    def may_be_early(self, members: Sequence[int]) -> bool:
        """Whether the inputs of all members, up to packing, are available when the first is issued."""
        nodes = [self.nodes[m] for m in members]
        return all(map(_readers, nodes)) and all(map(is_light, _needed_after_first(nodes)))


def _readers(collective: fx.Node) -> list[fx.Node]:
    """The nodes that read the received tensor."""
    return [reader for wait in collective.users for reader in wait.users]


def _insert(graph: fx.Graph, found: Sequence[Bucket]) -> None:
    """Inserts the buckets into a local graph."""
    nodes = [n for n in graph.nodes if is_collective(n)]
    for one in found:
        members = [nodes[k] for k in one.members]
        reader = min(reader for m in members for reader in _readers(m))
        start = members[0] if one.early else members[-1]
        if one.early:
            for node in sorted(_needed_after_first(members)):
                start.prepend(node)
        kind, ranks = KINDS[start.target], _ranks(start)
        buffers = [m.all_input_nodes[0] for m in members]
        emit = Emitter(graph, start)
        flat = [emit(aten.reshape.default, b, [ranks, -1] if ranks else [-1]) for b in buffers]
        packed = emit(aten.cat.default, flat, 1 if ranks else 0)
        buffer = emit(aten.reshape.default, packed, list(_packed_shape(kind, [_shape(b) for b in buffers])))
        joined = emit(start.target, buffer, *start.args[1:])
        _unpack(graph, reader, joined, members, kind)


def _needed_after_first(members: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes after the first member from which the others are computed."""

    def inputs(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if members[0] < n]

    return reached((n for member in members[1:] for n in inputs(member)), inputs)


def _unpack(graph: fx.Graph, reader: fx.Node, joined: fx.Node, members: Sequence[fx.Node], kind: str) -> None:
    """Emits one wait before the first reader, and each member's part of the received buffer."""
    emit = Emitter(graph, reader, turn=joined.meta.get("turn", 0))
    arrived = emit(torch.ops._c10d_functional.wait_tensor.default, joined)
    rows = _rows(kind, members[0])
    sizes = [w.meta["val"].numel() // rows for m in members for w in m.users]
    whole = emit(aten.reshape.default, arrived, [rows, -1])
    start = 0
    for member, size in zip(members, sizes, strict=True):
        (wait,) = member.users
        part = _columns(emit, whole, start, size)
        own = emit(aten.reshape.default, part, list(_shape(wait)))
        if not is_dense(own.meta["val"]):
            own = emit(aten.clone.default, own, memory_format=torch.contiguous_format)
        wait.replace_all_uses_with(own)
        graph.erase_node(wait)
        graph.erase_node(member)
        start += size


def _columns(emit: Emitter, whole: fx.Node, start: Any, size: Any) -> fx.Node:
    """Columns ``start`` to ``start + size`` of a contiguous matrix. torch takes the length of a slice for unknown unless it can prove that
    the slice lies within the dim, which it cannot for some sums of rounded sizes."""
    rows, total = _shape(whole)
    if surely_within(start, size, total):
        return emit(aten.slice.Tensor, whole, 1, start, start + size)
    return emit(aten.as_strided.default, whole, [rows, size], [total, 1], start)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _ranks(node: fx.Node) -> int:
    """The number of per-rank parts of the input buffer; 0 if it is not divided by rank."""
    kind = KINDS[node.target]
    return int(node.args[2]) if kind == "reduce_scatter" else len(node.args[1]) if kind == "all_to_all" else 0


def _rows(kind: str, node: fx.Node) -> int:
    """The number of per-rank parts of the result."""
    return int(node.args[1]) if kind == "all_gather" else len(node.args[1]) if kind == "all_to_all" else 1


def _packed_shape(kind: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Shape of the merged input buffer; dim 0 counts ranks for an all-to-all."""
    total = sum(map(math.prod, shapes))
    return (shapes[0][0], total // shapes[0][0]) if kind == "all_to_all" else (total,)
