"""Overlap of communication and compute: only gathers of parameters and reductions of their gradients overlap.

All other communication is exposed. A parameter exists before the step, so it can be gathered while operators before its reader run; a
gradient is only returned, so it can be reduced while operators after its producer run. How much time can be hidden is fixed before the
solver chooses anything. Operators that read a parameter or produce a gradient are *borders*; they divide the graph, in its order, into
segments, the k-th from border k - 1 to just before border k. A gather for border k may overlap with the AHEAD segments k, k - 1, ...;
a reduction of a result of border k with the AHEAD segments from k + 2 on (segment k + 1 begins with the producer).

The transfers that may overlap with a segment share its compute time in proportion to their bytes, so that no time is used twice. The
*window* of a transfer is the sum of its shares (a value redistributed to two layouts in one half has the whole window for each).
An operator counts with its shortest time over all specs, a lower bound for every plan.

    hidden = overlap min(part C, window),        part = min(1, window / C_full)

C is the time of the collectives of a redistribution (its slices and masks run on the device itself), C_full the time to gather the whole
parameter from shards, or to reduce a pending gradient to shards, and overlap is ``Hardware.overlap``, the fraction of hidden time that
is saved. The price uses part C, not ``min(C, window)``, so that it remains a distance between layouts, for which the solver's bounds are
tight (decision 0013).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard

from fxshard.cost import node_times, time_price
from fxshard.graph.call import Call
from fxshard.graph.planning_graph import RELABELS, UNKNOWN, PlanningGraph, is_tensor, operands, plain_shape, planned_nodes, producer
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout, canonical, sharding_axes
from fxshard.layout.redistribution import path_table
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.identity_cache import IdentityCache
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.plans.plan_data import OpSpec

FloatOrArray = TypeVar("FloatOrArray", float, np.ndarray)
AHEAD = 8
"""Number of segments that hide one redistribution: about a layer of a transformer, because FSDP gathers one layer ahead."""

Place = tuple[str, int]
"""A use (node, operand) or a definition (node, output)."""


@dataclass(frozen=True)
class Claim:
    """A transfer of ``size`` bytes that may overlap: of a parameter read, or a gradient ``made``, at border number ``border``."""

    border: int
    made: bool
    place: Place
    size: int

    def segments(self, count: int) -> range:
        """The segments, of ``count``, with which the transfer may overlap."""
        if self.made:
            return range(self.border + 2, min(self.border + 2 + AHEAD, count))
        return range(max(0, self.border + 1 - AHEAD), self.border + 1)


@dataclass(frozen=True)
class OverlapAtSize:
    """How much of a value's redistributions is hidden behind compute: the fraction ``part`` of their time can overlap, at most ``window``
    microseconds, and the fraction ``share`` of that is saved. ``joins``: they are bucketed with others, with one start-up time."""

    share: float
    part: float
    window: float
    joins: bool = False

    def hidden(self, communication: FloatOrArray) -> FloatOrArray:
        """Microseconds saved of a ``communication`` time in microseconds."""
        found: FloatOrArray = self.share * np.minimum(self.part * communication, self.window)
        return found


@dataclass(frozen=True)
class MeanOverlap:
    """The overlap of a value at several sizes: (weight, overlap there)."""

    each: tuple[tuple[float, OverlapAtSize | None], ...]

    @property
    def joins(self) -> bool:
        return any(overlap is not None and overlap.joins for _, overlap in self.each)

    def hidden(self, communication: np.ndarray) -> Any:
        """Mean of the saved microseconds; ``communication``: one number or array per size."""
        terms = zip(self.each, communication, strict=True)
        return sum(weight * overlap.hidden(time) for (weight, overlap), time in terms if overlap is not None)


Overlap = OverlapAtSize | MeanOverlap

BUCKETED = OverlapAtSize(0.0, 0.0, 0.0, joins=True)
"""For hardware without overlap: parameters and gradients hide nothing but are bucketed. Reductions run at the end of the step, gathers
at the beginning of its half (``passes.bucket``)."""


@dataclass(frozen=True)
class Windows:
    """The compute time that can hide each redistribution of a graph on a mesh; ``specs``: the legal specs of its nodes."""

    graph: PlanningGraph
    mesh: Mesh
    specs: Mapping[str, tuple[OpSpec, ...]]
    calls: Mapping[str, Call]

    def of(self, value: fx.Node, readers: Iterable[Place]) -> OverlapAtSize | None:
        """The overlap of a value's redistribution for these readers; None if it is exposed.

        If some of the readers are in the forward, the redistribution happens there, and only they count.
        """
        share = self.mesh.hardware.overlap
        if not share:
            return BUCKETED if value in self._gradients or producer(value)[0] in self._parameters else None
        source, output = producer(value)
        made = source not in self._parameters
        early = [reader for reader in readers if reader[0] in self._forward]
        places = [(True, (source.name, output))] if made else [(False, reader) for reader in early or readers]
        window = min((self._windows.get(place, 0.0) for place in places), default=0.0)
        if not window:
            return None
        tensor = value.meta["val"]
        full = _full_time(plain_shape(tensor.shape), tensor.dtype.itemsize, self.mesh, made)
        return OverlapAtSize(share, min(1.0, window / full) if full else 1.0, window)

    @cached_property
    def _forward(self) -> set[str]:
        """Names of the operators in the forward."""
        times = Lifetimes(self.graph)
        return {n.name for n in times.time if n.op == "call_function" and not times.in_backward(n)}

    @cached_property
    def _parameters(self) -> set[fx.Node]:
        """Parameters, and their views and casts (``RELABELS``)."""
        found = {self.graph.by_name[end.node] for end in self.graph.inputs_of("parameter")}
        for node in planned_nodes(self.graph):
            if name_of(node.target) in RELABELS and (read := operands(node)) and all(producer(value)[0] in found for value in read):
                found.add(node)
        return found

    @cached_property
    def _gradients(self) -> set[fx.Node]:
        """Values that are used only as a parameter's gradient, or only to make one by views and casts."""
        trained = {end.name for end in self.graph.inputs_of("parameter")}
        ends = zip(self.graph.outputs, operands(self.graph.module.graph.output_node()), strict=True)
        kept = {value for end, value in ends if end.kind != "gradient" or end.name not in trained}
        found: set[fx.Node] = set()

        def passes_on(value: fx.Node, user: fx.Node) -> bool:
            if user.op == "output":
                return value not in kept
            return user in found and operands(user) == (value,) and name_of(user.target) in RELABELS

        for node in reversed(list(self.graph.nodes)):
            if is_tensor(node) and node.users and all(passes_on(node, user) for user in node.users):
                found.add(node)
        return found

    @cached_property
    def _windows(self) -> Mapping[tuple[bool, Place], float]:
        """Windows in microseconds by (whether the value is made, place): each segment's time is shared among its claims by bytes."""
        segments, claims = self._segments_and_claims()
        times = [math.fsum(computed) for computed in segments]
        sizes = [0] * len(times)
        for claim in claims:
            for k in claim.segments(len(times)):
                sizes[k] += claim.size
        return {(c.made, c.place): math.fsum(times[k] * c.size / sizes[k] for k in c.segments(len(times)) if c.size) for c in claims}

    def _segments_and_claims(self) -> tuple[list[list[float]], list[Claim]]:
        """(compute times of the operators in each segment, the claims to them)."""
        made: dict[fx.Node, list[fx.Node]] = {}
        for value in self._gradients:
            made.setdefault(producer(value)[0], []).append(value)
        segments: list[list[float]] = [[]]
        claims: list[Claim] = []
        unreduced = self.graph.unreduced
        for node in planned_nodes(self.graph):
            if node.op != "call_function":
                continue
            if name_of(node.target) not in RELABELS:
                border, before = len(segments) - 1, len(claims)
                reads = [(k, value) for k, value in enumerate(operands(node)) if producer(value)[0] in self._parameters]
                results = made.get(node, [])
                claims += [Claim(border, False, (node.name, k), _bytes(value)) for k, value in reads]
                claims += [Claim(border, True, (node.name, producer(v)[1]), _bytes(v)) for v in results if v.name not in unreduced]
                if len(claims) > before or results:
                    segments.append([])
            elif node in made and any(value.name in unreduced for value in operands(node)):
                claims.append(Claim(len(segments) - 2, True, (node.name, 0), _bytes(node)))  # a gradient cast before it is reduced
            segments[-1].append(self._min_compute_time(node))
        return segments, claims

    @cached_property
    def _cache(self) -> IdentityCache:
        return IdentityCache()

    def _min_compute_time(self, node: fx.Node) -> float:
        """A lower bound of a node's compute time, in microseconds."""
        call, specs = self.calls[node.name], self.specs[node.name]
        return self._cache(("least", call), (specs,), lambda: min(node_times(call, specs, self.mesh)))


@lru_cache(maxsize=4096)
def _full_time(shape: tuple[int, ...], itemsize: int, mesh: Mesh, made: bool) -> float:
    """Microseconds to gather a tensor that is sharded on every axis; if ``made``, to reduce one that is pending on every axis to shards."""
    paths = path_table(shape, itemsize, mesh, ("sum",), time_price(mesh))
    axes = sharding_axes(mesh.shape)
    cut = [paths.index[layout] for layout in paths.layouts if all(isinstance(layout[axis], Shard) for axis in axes)]
    other = paths.index[canonical(Layout((Partial("sum") if made else Replicate(),) * mesh.ndim), mesh.shape)]
    return min((float(paths.communication[(other, k) if made else (k, other)]) for k in cut), default=0.0)


def _bytes(value: fx.Node) -> int:
    tensor = value.meta["val"]
    shape = plain_shape(tensor.shape)
    return 0 if UNKNOWN in shape else math.prod(shape) * tensor.dtype.itemsize
