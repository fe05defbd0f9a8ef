"""Where parameters and their optimiser's state are held, under a memory limit: on the device or on the host.

A parameter has each of its specs once for each *place*. ``DEVICE``: all of it is on the device. ``STATE``: the optimiser's state is on the
host; the optimiser's step copies it to the device and back, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from fxshard.cost.host import HostPrice, host_bytes, host_time
from fxshard.cost.optimizer_state import Optimizer
from fxshard.graph.planning_graph import shape_and_itemsize
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import Lifetimes, shard_bytes
from fxshard.plans.offload import OPTIMIZER, Offload

if TYPE_CHECKING:
    from fxshard.plans.plan_data import OpSpec

DEVICE, STATE = range(2)
PLACES = {OPTIMIZER: STATE}
KIND = {place: kind for kind, place in PLACES.items()}
BUFFERS = 2
"""Copies in the optimiser's step at once: while one parameter steps, the next is copied to the device."""


@dataclass(frozen=True)
class Offloading:
    """What may be on the host: ``kinds``, as in ``fxshard.plan``. ``fixed``: what is there, by node, if that is decided already."""

    kinds: tuple[str, ...] = ()
    fixed: Mapping[str, str] | None = None

    def places(self, node: fx.Node, times: Lifetimes, optimizer: Optimizer, limited: bool) -> tuple[int, ...]:
        """The places that a node may take, DEVICE first if it is among them."""
        if node.op != "placeholder" or times.kinds.get(node.name) != "parameter":
            return (DEVICE,)
        if self.fixed is not None:
            kind = self.fixed.get(node.name)
            return (DEVICE,) if kind is None or not _is_able(kind, node, times, optimizer) else (PLACES[kind],)
        able = [PLACES[kind] for kind in PLACES if limited and kind in self.kinds and _is_able(kind, node, times, optimizer)]
        return (DEVICE, *able)


def _is_able(kind: str, node: fx.Node, times: Lifetimes, optimizer: Optimizer) -> bool:
    """Whether a parameter has something of this kind."""
    return node.name in times.trained and optimizer.bytes_per_element(node.meta["val"].dtype) > 0


@dataclass(frozen=True)
class HostCopies:
    """The copies between device and host that plans need. ``unit``: of the objective."""

    times: Lifetimes
    mesh: Mesh
    optimizer: Optimizer
    unit: str = "microseconds"
    price: HostPrice = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "price", host_bytes if self.unit == "bytes" else host_time(self.mesh.hardware))

    def of(self, node: fx.Node, layout: Layout, place: int) -> Offload:
        """What a parameter in ``layout`` costs in a place other than DEVICE."""
        _, state = shard_and_state(node, layout, self.mesh, self.optimizer)
        count = self.optimizer.tensors(node.meta["val"].dtype)
        return Offload(node.name, KIND[place], state, state, state, self.price(2 * state, 2 * count))

    def costs(self, node: fx.Node, specs: Sequence[OpSpec], places: Sequence[int]) -> np.ndarray:
        """The same cost for each place, and for each spec there."""
        return np.array([0.0 if place == DEVICE else self.of(node, spec.outputs[0], place).cost for place in places for spec in specs])

    def entries(self, specs: Mapping[str, OpSpec], places: Mapping[str, int]) -> tuple[Offload, ...]:
        """The plan's entries: ``places`` of the nodes that are not on the device."""
        known = self.times.graph.by_name
        return tuple(self.of(known[name], specs[name].outputs[0], place) for name, place in places.items())


def shard_and_state(node: fx.Node, layout: Layout, mesh: Mesh, optimizer: Optimizer) -> tuple[int, int]:
    """Bytes of a parameter's largest shard and of its optimiser's state."""
    shape, itemsize = shape_and_itemsize(node)
    size = shard_bytes(shape, itemsize, layout, mesh.shape)
    return size, size // itemsize * optimizer.bytes_per_element(node.meta["val"].dtype)


def staged_bytes(node: fx.Node, layout: Layout, place: int, mesh: Mesh, optimizer: Optimizer) -> int:
    """Bytes that the optimiser's step needs on the device for a parameter in ``place``, in all its buffers."""
    return BUFFERS * shard_and_state(node, layout, mesh, optimizer)[1]


def held_on_device(place: int, state: float) -> float:
    """Bytes that the device always holds, per byte of the parameter; ``state``: with the state of its optimiser."""
    return state if place == DEVICE else 1.0
