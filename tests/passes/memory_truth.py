"""The peak memory of a plan, counted at each time from a graph and the layouts that its nodes read and give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx
from torch.distributed.tensor import Shard

from fxshard.graph.planning_graph import PlanningGraph, is_tensor, operands, planned_nodes, producer
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price, Step, steps, walk
from fxshard.mesh.mesh import Mesh
from fxshard.plans.plan_data import OpSpec

VIEWS = {"aten.t.default", "aten.view.default", "aten.permute.default", "aten.transpose.int", "aten.alias.default", "aten.detach.default"}


def peak_memory(graph: PlanningGraph, specs: Mapping[str, OpSpec], results: Sequence[Layout], mesh: Mesh, price: Price) -> int:
    """Bytes at the peak, from the lifetime of each value in each layout.

    In its original layout a value lives until its last reader in that layout, or the last reader of such a view, is done and until it has
    been redistributed to all other layouts. In another layout it lives from the first reader in that layout to the last. Inputs (tangents
    from their first reader) and results live to the end. A value that is only returned is redistributed right after it is made. Each
    redistribution adds its workspace at the time when it runs.
    """
    nodes = planned_nodes(graph)
    end, when = len(nodes), {n: t for t, n in enumerate(nodes)}
    reads = [(o, n, specs[n.name].inputs[k]) for n in nodes if n.op == "call_function" for k, o in enumerate(operands(n))]
    reads += [(o, nodes[-1], results[k]) for k, o in enumerate(operands(nodes[-1]))]

    def mine(value: fx.Node) -> list[tuple[fx.Node, Layout]]:
        return [(n, layout) for o, n, layout in reads if o is value]

    def done(reader: fx.Node) -> int:
        if reader.op == "output":
            return end
        return made_until(reader) if str(reader.target) in VIEWS else when[reader] + 1

    def made_until(value: fx.Node) -> int:
        source, index = producer(value)
        have, found = specs[source.name].outputs[index], [when[source] + 1]
        for layout in {layout for _, layout in mine(value)}:
            readers = [n for n, at in mine(value) if at == layout]
            if layout != have:
                found.append(first(value, readers) + 1)
            else:
                found += map(done, readers)
        return max(found)

    def first(value: fx.Node, readers: Sequence[fx.Node]) -> int:
        source = producer(value)[0]
        only = source.op != "placeholder" and all(n.op == "output" for n, _ in mine(value))
        return when[source] if only else min(when[n] for n in readers)

    def size(value: fx.Node, layout: Layout) -> int:
        return _bytes(tuple(value.meta["val"].shape), layout, mesh, value.meta["val"].dtype.itemsize)

    tangents = {end.node for end in graph.inputs_of("tangent")}
    steps = [0] * (end + 1)

    def there(lo: int, hi: int, bytes_: int) -> None:
        steps[lo] += bytes_
        steps[hi] -= bytes_

    for value in (n for n in graph.nodes if n.op != "output" and is_tensor(n)):
        source, index = producer(value)
        have = specs[source.name].outputs[index]
        if source.op == "placeholder":
            given = source.name in tangents
            there(min((when[n] for n, _ in mine(value)), default=0) if given else 0, end, size(value, have))
        elif str(source.target) not in VIEWS:
            there(when[source], made_until(value), size(value, have))
        for layout in {layout for _, layout in mine(value)} - {have}:
            readers = [n for n, at in mine(value) if at == layout]
            begin = first(value, readers)
            there(begin, max(map(done, readers)), size(value, layout))
            there(begin, begin + 1, _meanwhile(value.meta["val"], have, layout, mesh, price))
    return max(itertools.accumulate(steps))


def peak_memory_bound(graph: PlanningGraph, specs: Mapping[str, OpSpec], results: Sequence[Layout], mesh: Mesh, price: Price) -> int:
    """Bytes at the peak, from lifetimes that are surely long enough.

    In its original layout a value lives until its last reader, or that of a view, is done; in each other layout from the first reader of
    any layout until the same time. Inputs (tangents from their first reader) and results live to the end. A value that is only returned
    has its original layout only while it is made. The workspace of all redistributions of a value counts at each of its readers.
    """
    nodes = planned_nodes(graph)
    end, when = len(nodes), {n: t for t, n in enumerate(nodes)}
    reads = [(o, n, specs[n.name].inputs[k]) for n in nodes if n.op == "call_function" for k, o in enumerate(operands(n))]
    reads += [(o, nodes[-1], results[k]) for k, o in enumerate(operands(nodes[-1]))]

    def until(value: fx.Node) -> int:
        return max([when[producer(value)[0]] + 1, *(_done(n) for o, n, _ in reads if o is value)])

    def _done(reader: fx.Node) -> int:
        if reader.op == "output":
            return end
        return until(reader) if str(reader.target) in VIEWS else when[reader] + 1

    def size(value: fx.Node, layout: Layout) -> int:
        return _bytes(tuple(value.meta["val"].shape), layout, mesh, value.meta["val"].dtype.itemsize)

    tangents = {end.node for end in graph.inputs_of("tangent")}
    most = 0
    for now in range(end):
        held = 0
        for value in (n for n in graph.nodes if n.op != "output" and is_tensor(n)):
            source, index = producer(value)
            assert str(source.target) not in VIEWS, "the graphs of these tests must have no views"
            mine = [(n, layout) for o, n, layout in reads if o is value]
            have, born = specs[source.name].outputs[index], when[source]
            if source.op == "placeholder":
                given = min((when[n] for n, _ in mine), default=0) if source.name in tangents else 0
                held += size(value, have) if now >= given else 0
                others, first = {layout for _, layout in mine} - {have}, min((when[n] for n, _ in mine), default=end)
            elif mine and all(n.op == "output" for n, _ in mine):
                others, first = {layout for _, layout in mine} - ({have} if now == born else set()), born
                held += size(value, have) if now == born else 0
            else:
                held += size(value, have) if born <= now < until(value) else 0
                others, first = {layout for _, layout in mine} - {have}, min((when[n] for n, _ in mine), default=end)
            held += sum(size(value, layout) for layout in others if first <= now < until(value))
            only = mine and source.op != "placeholder" and all(n.op == "output" for n, _ in mine)
            if now in ({born} if only else {when[n] for n, _ in mine}):
                held += sum(_meanwhile(value.meta["val"], have, layout, mesh, price) for layout in {layout for _, layout in mine} - {have})
        most = max(most, held)
    return most


def _meanwhile(value: torch.Tensor, have: Layout, want: Layout, mesh: Mesh, price: Price) -> int:
    """The workspace of a redistribution in bytes, beside the tensor in both layouts; buffers of collectives are counted by hand."""
    shape, itemsize = tuple(value.shape), value.dtype.itemsize
    path = list(walk(have, steps(have, want, shape, itemsize, mesh, price)))
    most, given = 0, _bytes(shape, have, mesh, itemsize)
    for number, (layout, step, after) in enumerate(path):
        x, y, n = _bytes(shape, layout, mesh, itemsize), _bytes(shape, after, mesh, itemsize), mesh.shape[step.axis]
        for taken, reads in _stages(step, x, y, n, shape, mesh.shape == (n,)):
            most = max(most, taken + (x if reads or number == 0 else 0) + (given if number else 0))
    return most - given - y


def _stages(step: Step, x: int, y: int, n: int, shape: tuple[int, ...], alone: bool) -> list[tuple[int, bool]]:
    """The stages of a step from ``x`` to ``y`` bytes of a float matrix: (bytes beside the input, whether the input is still needed)."""
    assert alone, "counted for meshes of one axis only"
    if step.kind == "all_reduce":
        return [(y, True)]
    if step.kind == "to_partial":  # a flag for the first rank, a zero for the others, the result
        return [(1 + 4 + y, True)]
    if step.kind == "all_gather":
        assert isinstance(step.source, Shard)
        straight = step.source.dim == 0 and n * x == y  # the shards are contiguous in the result
        return [(n * x, True)] if straight else [(n * x, True), (n * x + y, False)]
    assert isinstance(step.target, Shard)
    size = shape[step.target.dim]
    length = -(-size // n)
    if step.kind == "slice":  # indexes from zero, the offset of the rank, indexes from that offset
        return [(8 * length + 8 + 8 * length, True), (8 * length + y, True)]
    short = sum(min(length, max(0, size - i * length)) < length for i in range(n))  # shards that are padded
    if step.kind == "reduce_scatter":
        straight = step.target.dim == 0 and not short
        return [(y, True)] if straight else [(short * y + n * y, True), (n * y + y, False)]
    assert isinstance(step.source, Shard)
    block = length * -(-shape[step.source.dim] // n) * 4
    return [(short * block + n * block, True), (2 * n * block, False), (n * block + y, False)]


def _bytes(shape: tuple[int, ...], layout: Layout, mesh: Mesh, itemsize: int) -> int:
    sizes = list(shape)
    for placement, n in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // n)
    return math.prod(sizes) * itemsize
