"""What communication hides behind compute: gathers of parameters and reductions of their gradients, and nothing else.

Everything else is waited for. A parameter is there before the step, so that it can be gathered while the operators before its reader
run; a gradient is only returned, so that it can be reduced while operators after its maker run. How much may hide is fixed before
anything is chosen. The operators that read a parameter or make a gradient are *anchors*; they cut the graph, in its order, into
segments, the k-th from anchor k - 1 to just before anchor k. A gather for anchor k may run beside segments k, k - 1, ..., of which
there are AHEAD; a reduction of what anchor k makes beside the AHEAD segments from k + 2 on (k + 1 begins with its maker).

Those that may run beside a segment divide its compute by bytes, so that no operator hides two values at once, and their parts of all
their segments are their *window* (a value that is brought into two layouts for one half of the step has it for each).
Counted is the least that an operator takes in any of its specs: no plan computes for less.

    hidden = overlap min(part C, window),        part = min(1, window / C_full)

with C the time of the collectives of a redistribution (slices and masks on the way are the device's own work), C_full that of gathering
all of a parameter from shards, or of reducing a pending gradient to shards, and ``Hardware.overlap`` what hiding saves. A part, and
not ``min(C, window)``: prices stay a distance between layouts, on which the solver's bounds are tight (decision 0013).
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

from fxshard.cost import compute_time, time_price
from fxshard.graph.call import Call
from fxshard.graph.planning_graph import RELABELS, UNKNOWN, PlanningGraph, is_tensor, operands, plain_shape, planned_nodes, producer
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import path_table
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.memoised import Alike
from fxshard.plans.plan_data import OpSpec

FloatOrArray = TypeVar("FloatOrArray", float, np.ndarray)
AHEAD = 8
"""Segments that hide one redistribution: about a layer of a transformer, as FSDP gathers one layer ahead."""

Place = tuple[str, int]
"""Who reads (node, operand), or what is made (node, output)."""


@dataclass(frozen=True)
class Claim:
    """Something of ``size`` bytes that is read or ``made`` at anchor number ``anchor``."""

    anchor: int
    made: bool
    place: Place
    size: int

    def segments(self, count: int) -> range:
        """Those, of so many, beside which it can be communicated."""
        if self.made:
            return range(self.anchor + 2, min(self.anchor + 2 + AHEAD, count))
        return range(max(0, self.anchor + 1 - AHEAD), self.anchor + 1)


@dataclass(frozen=True)
class Beside:
    """What compute hides of the redistributions of a value: the ``part`` of their time that can run beside it, at most ``window``
    microseconds, of which ``share`` costs nothing. ``joins``: they become one with others of their kind, which start once."""

    share: float
    part: float
    window: float
    joins: bool = False

    def hidden(self, communication: FloatOrArray) -> FloatOrArray:
        """Microseconds that are not paid of so many in which collectives run."""
        found: FloatOrArray = self.share * np.minimum(self.part * communication, self.window)
        return found


@dataclass(frozen=True)
class BesideEach:
    """The same of a value at several sizes: (weight, what hides there)."""

    each: tuple[tuple[float, Beside | None], ...]

    @property
    def joins(self) -> bool:
        return any(beside is not None and beside.joins for _, beside in self.each)

    def hidden(self, communication: np.ndarray) -> Any:
        """In the mean, of what collectives run at each of the sizes: a number, or an array, of each."""
        terms = zip(self.each, communication, strict=True)
        return sum(weight * beside.hidden(time) for (weight, beside), time in terms if beside is not None)


Hiding = Beside | BesideEach

JOINED = Beside(0.0, 0.0, 0.0, joins=True)
"""Of a gradient, or of a parameter, where nothing hides: reductions wait for the end of the step together, what parameters are brought by
begins when a half begins (``passes.bucket``)."""


@dataclass(frozen=True)
class Windows:
    """Of a graph on a mesh, with what its nodes may do: the compute that hides a redistribution."""

    graph: PlanningGraph
    mesh: Mesh
    specs: Mapping[str, tuple[OpSpec, ...]]
    calls: Mapping[str, Call]

    def of(self, value: fx.Node, readers: Iterable[Place]) -> Beside | None:
        """What hides when a value is brought to these readers; None where it is waited for.

        What the forward reads is brought there for it, so that then the backward's readers say nothing.
        """
        share = self.mesh.hardware.overlap
        if not share:
            return JOINED if value in self._returned or producer(value)[0] in self._given else None
        source, output = producer(value)
        made = source not in self._given
        early = [reader for reader in readers if reader[0] in self._early]
        places = [(True, (source.name, output))] if made else [(False, reader) for reader in early or readers]
        window = min((self._windows.get(place, 0.0) for place in places), default=0.0)
        if not window:
            return None
        tensor = value.meta["val"]
        full = _full(plain_shape(tensor.shape), tensor.dtype.itemsize, self.mesh, made)
        return Beside(share, min(1.0, window / full) if full else 1.0, window)

    @cached_property
    def _early(self) -> set[str]:
        """Names of the operators of the forward."""
        times = Lifetimes(self.graph)
        return {n.name for n in times.time if n.op == "call_function" and not times.late(n)}

    @cached_property
    def _given(self) -> set[fx.Node]:
        """Parameters, and what is made of one by relabelling."""
        found = {self.graph.by_name[end.node] for end in self.graph.inputs_of("parameter")}
        for node in planned_nodes(self.graph):
            if name_of(node.target) in RELABELS and (read := operands(node)) and all(producer(value)[0] in found for value in read):
                found.add(node)
        return found

    @cached_property
    def _returned(self) -> set[fx.Node]:
        """Values that are nothing but a parameter's gradient, or relabelled for one."""
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
        """By (whether it is made, where): of each segment that a claim has the part of its bytes in all claims to that segment."""
        segments, claims = self._anchored()
        times = [math.fsum(computed) for computed in segments]
        sizes = [0] * len(times)
        for claim in claims:
            for k in claim.segments(len(times)):
                sizes[k] += claim.size
        return {(c.made, c.place): math.fsum(times[k] * c.size / sizes[k] for k in c.segments(len(times)) if c.size) for c in claims}

    def _anchored(self) -> tuple[list[list[float]], list[Claim]]:
        """What is computed in each segment, and who claims some of it."""
        made: dict[fx.Node, list[fx.Node]] = {}
        for value in self._returned:
            made.setdefault(producer(value)[0], []).append(value)
        segments: list[list[float]] = [[]]
        claims: list[Claim] = []
        for node in planned_nodes(self.graph):
            if node.op != "call_function":
                continue
            if name_of(node.target) not in RELABELS:
                anchor, before = len(segments) - 1, len(claims)
                reads = [(k, value) for k, value in enumerate(operands(node)) if producer(value)[0] in self._given]
                claims += [Claim(anchor, False, (node.name, k), _bytes(value)) for k, value in reads]
                claims += [Claim(anchor, True, (node.name, producer(value)[1]), _bytes(value)) for value in made.get(node, ())]
                if len(claims) > before:
                    segments.append([])
            segments[-1].append(self._least(node))
        return segments, claims

    @cached_property
    def _alike(self) -> Alike:
        return Alike()

    def _least(self, node: fx.Node) -> float:
        """Microseconds that a node computes at least."""
        call, specs = self.calls[node.name], self.specs[node.name]
        return self._alike(("least", call), (specs,), lambda: min(compute_time(call, spec, self.mesh) for spec in specs))


@lru_cache(maxsize=4096)
def _full(shape: tuple[int, ...], itemsize: int, mesh: Mesh, made: bool) -> float:
    """Microseconds of gathering a tensor that is cut on every axis; where it is made, of reducing one to that that is pending on each."""
    paths = path_table(shape, itemsize, mesh, ("sum",), time_price(mesh))
    cut = [paths.index[layout] for layout in paths.layouts if all(isinstance(p, Shard) for p in layout)]
    other = paths.index[Layout((Partial("sum") if made else Replicate(),) * mesh.ndim)]
    return min((float(paths.communication[(other, k) if made else (k, other)]) for k in cut), default=0.0)


def _bytes(value: fx.Node) -> int:
    tensor = value.meta["val"]
    shape = plain_shape(tensor.shape)
    return 0 if UNKNOWN in shape else math.prod(shape) * tensor.dtype.itemsize
