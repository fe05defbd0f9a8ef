"""Prices of an annotated graph: at its own sizes, or weighted means over several sizes.

The means are taken of a node's compute time in a spec, of the price of each step of a redistribution, and of the time that overlap hides.
A redistribution takes the same steps at all sizes: those that are cheapest in the mean. Nodes at different sizes correspond by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import fx

from fxshard.cost import node_times
from fxshard.graph.call import Call
from fxshard.graph.planning_graph import PlanningGraph, outputs_of, plain_shape
from fxshard.layout.redistribution import AnyShape, WeightedShapes
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.overlap import MeanOverlap, Overlap, Place, Windows
from fxshard.plans.plan_data import OpSpec
from fxshard.strategies import own_collectives


class Sample(Protocol):
    """An annotated graph at one of the sizes: the part of ``Annotated`` that prices depend on."""

    @property
    def graph(self) -> PlanningGraph: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def calls(self) -> Mapping[str, Call]: ...
    @property
    def windows(self) -> Windows: ...


@dataclass(frozen=True)
class Prices:
    """``samples``: (weight, the graph at those sizes); weights add up to 1."""

    samples: Sequence[tuple[float, Sample]]

    def calls(self, node: str) -> tuple[Call | None, ...]:
        """The call of a node at each of the sizes, which determine its price."""
        return tuple(annotated.calls.get(node) for _, annotated in self.samples)

    def computing(self, node: str, specs: tuple[OpSpec, ...]) -> np.ndarray:
        """[specs] time of a node in each spec, in microseconds: its compute, and its own collectives."""
        found = np.zeros(len(specs))
        for weight, annotated in self.samples:
            call = annotated.calls.get(node)
            if call is not None:
                found += weight * np.array(node_times(call, specs, annotated.mesh))
        return found

    def sending(self, node: str, specs: tuple[OpSpec, ...]) -> np.ndarray:
        """[specs] bytes that a node's own collectives send in each spec."""
        return np.array([sum(self.sent(node, spec).values()) for spec in specs], dtype=np.float64)

    def sent(self, node: str, spec: OpSpec) -> Mapping[str, float]:
        """The same by mesh axis."""
        found: dict[str, float] = {}
        for weight, annotated in self.samples:
            call = annotated.calls.get(node)
            for one in () if call is None else own_collectives(call, spec, annotated.mesh):
                found[one.axis] = found.get(one.axis, 0.0) + weight * one.bytes(annotated.mesh)
        return found

    def extent(self, value: fx.Node, output: int | None = None) -> tuple[AnyShape, int]:
        """(sizes, UNKNOWN if known only at run time; bytes per element) of a value, or of one of the outputs of a node."""
        shapes, itemsize = [], 0
        for _, annotated in self.samples:
            node = annotated.graph.by_name[value.name]
            tensor = node.meta["val"] if output is None else outputs_of(node)[output]
            assert tensor is not None
            shapes.append(plain_shape(tensor.shape))
            itemsize = tensor.dtype.itemsize
        return shapes[0] if len(shapes) == 1 else WeightedShapes(tuple(shapes), tuple(weight for weight, _ in self.samples)), itemsize

    def overlap(self, value: str, readers: Iterable[Place]) -> Overlap | None:
        """The overlap of a value's redistribution for these readers, as ``Windows.of`` gives it."""
        found = [(weight, one.windows.of(one.graph.by_name[value], readers)) for weight, one in self.samples]
        if all(overlap is None for _, overlap in found):
            return None
        return found[0][1] if len(found) == 1 else MeanOverlap(tuple(found))
