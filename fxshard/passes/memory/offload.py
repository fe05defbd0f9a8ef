"""Where parameters and their optimiser's state are held, under a memory limit: on the device or on the host.

A parameter has each of its specs once for each *place*. ``DEVICE``: all of it is on the device. ``STATE``: the optimiser's state is on the
host; the optimiser's step copies it to the device and back, parameter by parameter. ``PARAMETER``: the parameter is there too. It is copied
to the device where the forward first reads it, and again for the backward; its gradient, made on the device, is copied to the host at the
end of the backward, and the step copies all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from fxshard.cost.host import HostPrice, host_bytes, host_time
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.graph.planning_graph import shape_and_itemsize
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import Lifetimes, shard_bytes
from fxshard.passes.memory.saved_for_backward import Layouts
from fxshard.plans.offload import OPTIMIZER, PARAMETERS, Offload

if TYPE_CHECKING:
    from fxshard.plans.plan_data import OpSpec

DEVICE, STATE, PARAMETER = range(3)
PLACES = {OPTIMIZER: STATE, PARAMETERS: PARAMETER}
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
    """Whether a parameter has something of this kind. One that is returned or written has to be on the device."""
    if kind == OPTIMIZER:
        return node.name in times.trained and optimizer.bytes_per_element(node.meta["val"].dtype) > 0
    name = next(end.name for end in times.graph.inputs if end.node == node.name)
    written = any(end.name == name and end.kind != "gradient" for end in times.graph.outputs)
    readers = times.readers.get(node, ())
    return bool(readers) and not written and all(reader.op == "call_function" for reader in readers)


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
        trained = node.name in self.times.trained
        size, state = shard_and_state(node, layout, self.mesh, self.optimizer, trained)
        count = self.optimizer.tensors(node.meta["val"].dtype) if trained else 0
        if place == STATE:
            return Offload(node.name, KIND[place], state, state, state, self.price(2 * state, 2 * count))
        halves = len({self.times.in_backward(reader) for reader in self.times.readers[node]})
        inward = halves + 2 * trained, 2 * trained  # parameter and gradient to the step; gradient and parameter back
        copies, moved = sum(inward) + 2 * count, (inward[0] * size + state, inward[1] * size + state)
        return Offload(node.name, KIND[place], size + state, *moved, self.price(sum(moved), copies))

    def costs(self, node: fx.Node, specs: Sequence[OpSpec], places: Sequence[int]) -> np.ndarray:
        """The same cost for each place, and for each spec there."""
        return np.array([0.0 if place == DEVICE else self.of(node, spec.outputs[0], place).cost for place in places for spec in specs])

    def kept_costs(self, node: fx.Node, have: Layouts, places: Sequence[int], kept: Layouts, rereads: bool, several: bool) -> np.ndarray:
        """What a parameter costs together with the layout in which it is saved for the backward (``kept``, by state).

        A parameter on the host is read from there again, so it may not be saved in another layout. If only blocks that may be recomputed
        read it there (``rereads``), that costs one more copy; with ``several`` such blocks they may not be recomputed.
        """
        costs = np.zeros((len(have), len(kept)))
        for i, (layout, place) in enumerate(zip(have, places, strict=True)):
            for k, at in enumerate(kept):
                if place == PARAMETER and at is not None and layout is not None:
                    size = shard_and_state(node, layout, self.mesh, self.optimizer)[0]
                    again = (np.inf if several else self.price(size, 1)) if rereads else 0.0
                    costs[i, k] = again if at == layout else np.inf
        return costs

    def entries(self, specs: Mapping[str, OpSpec], places: Mapping[str, int]) -> tuple[Offload, ...]:
        """The plan's entries: ``places`` of the nodes that are not on the device."""
        known = self.times.graph.by_name
        return tuple(self.of(known[name], specs[name].outputs[0], place) for name, place in places.items())


def shard_and_state(node: fx.Node, layout: Layout, mesh: Mesh, optimizer: Optimizer, trained: bool = True) -> tuple[int, int]:
    """Bytes of a parameter's largest shard and of its optimiser's state, if it is ``trained``."""
    shape, itemsize = shape_and_itemsize(node)
    size = shard_bytes(shape, itemsize, layout, mesh.shape)
    return size, size // itemsize * optimizer.bytes_per_element(node.meta["val"].dtype) * trained


def staged_bytes(node: fx.Node, layout: Layout, place: int, mesh: Mesh, optimizer: Optimizer) -> int:
    """Bytes that the optimiser's step needs on the device for a trained parameter in ``place``, in all its buffers."""
    size, state = shard_and_state(node, layout, mesh, optimizer)
    return BUFFERS * (state + (2 * size if place == PARAMETER else 0))


def held_on_device(place: int, state: float) -> float:
    """Bytes that the device always holds, per byte of the parameter; ``state``: with the state of its optimiser."""
    return {DEVICE: state, STATE: 1.0, PARAMETER: 0.0}[place]
