"""A plan as data: one OpSpec per node and the redistributions between them. What can be derived from these is here; what needs JSON, text
or the process that planned is in sharding_plan.py.

Everything before the plan only decides, everything after it only obeys: lowering emits exactly these steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

from fxshard.errors import PlanError, closest
from fxshard.layout.layouts import Layout, canonical, ceil_shape
from fxshard.layout.redistribution import Step, exchange_shape, sent_bytes, walk
from fxshard.mesh.mesh import Mesh
from fxshard.plans.offload import Offload
from fxshard.shapes import WeightedSizes

NODE_COLLECTIVES = ("shift", "zigzag", "all_to_all", "dispatch", "combine")
"""The kinds of collectives that nodes issue themselves: ``shift`` sends a tensor to the next rank of the axis, ``zigzag`` its halves;
``dispatch`` sends rows to the ranks of their experts, ``combine`` brings them back, and an all-to-all tells their numbers."""
EXPERT_IMBALANCE = 1.25
"""Rows of the busiest rank's experts, as a multiple of the mean over ranks: an assumption, as routing depends on data. Losses that balance
experts, and capacities of 1.25 in GShard (Lepikhin et al., 2020) and Switch Transformers (Fedus et al., 2021), keep it near this."""


def node_collective_bytes(kind: str, size: int, ranks: int, room: int = 1) -> int:
    """Bytes that each of ``ranks`` ranks sends in a collective that a node issues, from an input buffer of ``size`` bytes.

    For rows of experts, what the busiest rank is expected to send and receive, from a buffer with ``room`` for as many times the mean.
    """
    if kind in ("shift", "zigzag"):
        return size
    if kind == "all_to_all":
        return (ranks - 1) * size // ranks
    return math.ceil(EXPERT_IMBALANCE * (ranks - 1) * size / ranks / room)


@dataclass(frozen=True)
class OpSpec:
    """One way to run a node: the layouts of its operands (in order of occurrence) and of its outputs."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @property
    def is_on_experts(self) -> bool:
        """Whether it has rows on the ranks of their experts, which the layouts alone do not describe."""
        return any(layout.expert_axes for layout in (*self.inputs, *self.outputs))

    def canonical(self, mesh_shape: Sequence[int]) -> OpSpec:
        """The spec with Replicate on axes of one rank, where all placements mean the same."""
        return OpSpec(*(tuple(canonical(layout, mesh_shape) for layout in side) for side in (self.inputs, self.outputs)))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True)
class NodeCollective:
    """A collective that a node issues itself, as part of its local form. ``axis``: of the mesh, by name; ``buffer``: the shape of each
    rank's input; ``operand``: the operand that is sent, whose layout counts. ``room``: of rows of experts, how many times the rows that
    are expected to be sent have room in the buffer."""

    kind: str
    axis: str
    buffer: tuple[int, ...]
    itemsize: int
    operand: int
    room: int = 1

    def bytes(self, mesh: Mesh) -> int:
        """Bytes that each rank sends."""
        size = math.prod(self.buffer) * self.itemsize
        return node_collective_bytes(self.kind, size, mesh.shape[mesh.axis(self.axis)], self.room)


@dataclass(frozen=True)
class PlannedNode:
    """A node's decision. ``shapes`` and ``dtypes`` are global, one per output; ``compute`` is its cost: its estimated time in microseconds,
    or the bytes that its own collectives send if the plan minimises bytes."""

    name: str
    op: str
    spec: OpSpec
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    compute: float = 0.0
    collectives: tuple[NodeCollective, ...] = ()


@dataclass(frozen=True)
class Redistribution:
    """A value redistributed from ``source`` to a layout that some readers need; ``readers`` are (node, operand index).

    ``value``: the graph node that holds the tensor (a getitem if the producer has several outputs). ``cost``: its share of the objective.
    ``hidden``: further microseconds assumed to overlap with compute. If the producer's layout is not ``source``, another redistribution of
    the value has ``source`` as its target: the copy saved for the backward. ``ahead``: only the backward reads the result, but it is made
    when the forward first reads the value, and saved.
    """

    value: str
    shape: tuple[int, ...]
    itemsize: int
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    readers: tuple[tuple[str, int], ...]
    cost: float = 0.0
    hidden: float = 0.0
    ahead: bool = False


@dataclass(frozen=True)
class PlannedCollective:
    """A planned collective: ``bytes`` is what each rank sends (ring algorithm), ``buffer`` the shape of each rank's input.

    It is a step of a redistribution, or issued by a node itself: then ``value`` is the node, and ``source`` and ``target`` are equal.
    """

    kind: str
    axis: str
    bytes: int
    value: str
    source: Layout
    target: Layout
    buffer: tuple[int, ...]
    itemsize: int
    readers: tuple[tuple[str, int], ...]
    entry: int
    """Index of the redistribution in the plan; of a node, counted from the last redistribution on."""
    step: int
    """Index of the step, or of the node's own collective, in it."""
    cost: float = 0.0
    """Its share of the objective: of a redistribution's cost, in proportion to what its steps take by latency and bandwidth of their
    axes' links, and to bytes if the plan minimises bytes. 0 for a node's own, whose cost the node's has."""
    hidden: float = 0.0
    """Its share of the redistribution's hidden microseconds."""

    @property
    def edge(self) -> str:
        return f"{self.value} -> {', '.join(sorted({r for r, _ in self.readers}))}"


@dataclass(frozen=True)
class Certificate:
    """The proven quality of the plan; ``unit`` is microseconds or bytes."""

    unit: str
    objective: float
    lower_bound: float
    cut: bool = False

    @property
    def gap(self) -> float:
        return (self.objective - self.lower_bound) / self.objective if self.objective else 0.0


@dataclass(frozen=True)
class PlanEnd:
    """An input or output of the graph: ``kind`` as in the planning graph (parameter, input, ..., output, gradient), user's name, node."""

    kind: str
    name: str
    node: str


AGAIN = "_again"


def again(node: str) -> str:
    """The planned name of a node's second run, in the backward."""
    return node + AGAIN


class Place(NamedTuple):
    """Where a node comes from: the innermost module, by its name ("" for the model itself), and whether its backward made the node."""

    module: str
    backward: bool = False


@dataclass(frozen=True)
class PlanData:
    """A plan for one graph on one mesh.

    ``memory``: bytes per device at the peak, by kind, at ``memory_sizes`` of its dynamic dims: the largest sizes
    under a ``memory_limit``, else the example's. ``example_sizes``: the sizes, with weights, over which the objective is averaged; empty if
    it is for the example's sizes, whose shapes all entries have. ``fallbacks``: (node, reason) of nodes
    that are always replicated or run in place of another operator. ``partial``: True if ``nodes`` covers only some nodes, which makes the
    plan a set of pins. ``recomputed``: blocks of the model whose activations are not saved for the backward -> the nodes that run again
    there, under the names that ``again`` gives. ``offloaded``: what is held in the memory of the host.

    Some fields only say where things come from, and count neither for equality nor for ``hash``: ``model`` is the name of its class ("" if
    unknown), ``lines`` gives the user's source line of a node, ``places`` its module, ``reads`` the nodes that make its operands,
    ``results`` which result of these it reads (left out if the first of all),
    ``picked`` the (node, output index) of a redistributed value that is one of several results.
    """

    mesh: Mesh
    train: bool
    graph_hash: str
    nodes: tuple[PlannedNode, ...]
    redistributions: tuple[Redistribution, ...] = ()
    certificate: Certificate = Certificate("microseconds", 0.0, 0.0)
    inputs: tuple[PlanEnd, ...] = ()
    outputs: tuple[PlanEnd, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    memory_limit: int | None = None
    memory_sizes: Mapping[str, int] = field(default_factory=dict)
    example_sizes: tuple[WeightedSizes, ...] = ()
    fallbacks: tuple[tuple[str, str], ...] = ()
    partial: bool = False
    recomputed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offloaded: tuple[Offload, ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    picked: Mapping[str, tuple[str, int]] = field(default_factory=dict, compare=False, repr=False)
    model: str = field(default="", compare=False, repr=False)
    places: Mapping[str, Place] = field(default_factory=dict, compare=False, repr=False)
    reads: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    results: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)

    def canonical(self) -> Self:
        """The plan with Replicate on axes of one rank, where all placements mean the same, and without the steps there."""
        shape = self.mesh.shape
        if 1 not in shape:
            return self
        nodes = tuple(replace(node, spec=node.spec.canonical(shape)) for node in self.nodes)
        moves = (replace(m, source=canonical(m.source, shape), target=canonical(m.target, shape)) for m in self.redistributions)
        moving = (replace(m, steps=tuple(s for s in m.steps if shape[s.axis] > 1)) for m in moves if m.source != m.target)
        return replace(self, nodes=nodes, redistributions=tuple(moving))

    @property
    def objective(self) -> float:
        return self.certificate.objective

    @property
    def lower_bound(self) -> float:
        return self.certificate.lower_bound

    @property
    def gap(self) -> float:
        return self.certificate.gap

    @cached_property
    def specs(self) -> dict[str, OpSpec]:
        return {n.name: n.spec for n in self.nodes}

    @cached_property
    def on_host(self) -> Mapping[str, str]:
        """Node of a parameter -> what of it is on the host, one of ``offload.KINDS``."""
        return {one.node: one.kind for one in self.offloaded}

    @cached_property
    def hidden(self) -> Mapping[str, float]:
        """Microseconds that the objective omits, assuming overlap with compute: ``gathers`` of parameters, ``reductions`` of gradients;
        zeros are omitted."""
        found: dict[str, list[float]] = {"gathers": [], "reductions": []}
        for entry in self.redistributions:
            reduces = any(step.kind in ("all_reduce", "reduce_scatter") for step in entry.steps)
            found["reductions" if reduces else "gathers"].append(entry.hidden)
        return {kind: time for kind, times in found.items() if (time := math.fsum(times))}

    def called(self, node: str) -> str:
        """The user's name of a parameter, buffer or input; else the node's name."""
        return self._names.get(node, node)

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """The kinds of the inputs (parameter, buffer, input, ...), by node."""
        return {end.node: end.kind for end in self.inputs}

    @cached_property
    def _names(self) -> dict[str, str]:
        return {end.node: end.name for end in self.inputs}

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """The planned collectives, in the order of the plan: those of redistributions, then those of nodes."""
        timed = self.certificate.unit == "microseconds"
        steps = tuple(one for index, entry in enumerate(self.redistributions) for one in _planned(self.mesh, entry, index, timed))
        first = len(self.redistributions)
        own = (_own(self.mesh, node, first + k, number) for k, node in enumerate(self.nodes) for number in range(len(node.collectives)))
        return (*steps, *own)

    def issuer(self, entry: int) -> PlannedNode | None:
        """The node that issues the collectives of an ``entry`` itself; None if it is a redistribution."""
        first = len(self.redistributions)
        return None if entry < first else self.nodes[entry - first]

    def layout_of(self, name: str) -> Layout:
        """Layout of a parameter, buffer or input by the user's name, or of a node's first output; raises PlanError for an unknown name."""
        return self.specs[self.node_of(name)].outputs[0]

    def node_of(self, name: str) -> str:
        """The node of a parameter, buffer or input by the user's name, or the node of that name. Raises PlanError for an unknown name."""
        node = next((end.node for end in self.inputs if end.name == name), name)
        if node not in self.specs:
            hint = closest(name, [*(end.name for end in self.inputs), *self.specs])
            what = f"the plan has no input or node {name!r}{hint}"
            raise PlanError(what, where=f"plan on mesh {self.mesh}", remedy="fxshard.inspect.nodes_table(plan) lists its nodes")
        return node

    def parameter_layouts(self) -> dict[str, Layout]:
        return {end.name: self.specs[end.node].outputs[0] for end in self.inputs if end.kind == "parameter"}


def _own(mesh: Mesh, node: PlannedNode, entry: int, number: int) -> PlannedCollective:
    one = node.collectives[number]
    at = node.spec.inputs[one.operand]
    return PlannedCollective(
        kind=one.kind,
        axis=one.axis,
        bytes=one.bytes(mesh),
        value=node.name,
        source=at,
        target=at,
        buffer=one.buffer,
        itemsize=one.itemsize,
        readers=((node.name, one.operand),),
        entry=entry,
        step=number,
    )


def _planned(mesh: Mesh, entry: Redistribution, index: int, timed: bool) -> list[PlannedCollective]:
    """The collectives of a redistribution, which share its cost."""
    path = [(k, layout, step) for k, (layout, step, _) in enumerate(walk(entry.source, entry.steps)) if step.is_collective]
    sent = [sent_bytes(step, layout, entry.shape, entry.itemsize, mesh) for _, layout, step in path]
    by_link = timed and len(path) > 1
    takes = [_by_link(mesh, step.axis, size) if by_link else float(size) for (_, _, step), size in zip(path, sent, strict=True)]
    whole = math.fsum(takes)
    shares = [one / whole if whole else 1 / len(takes) for one in takes]
    return [
        PlannedCollective(
            kind=step.kind,
            axis=mesh.axis_names[step.axis],
            bytes=size,
            value=entry.value,
            source=layout,
            target=step.after(layout),
            buffer=buffer_shape(step, layout, entry.shape, mesh),
            itemsize=entry.itemsize,
            readers=entry.readers,
            entry=index,
            step=number,
            cost=entry.cost * share,
            hidden=entry.hidden * share,
        )
        for (number, layout, step), size, share in zip(path, sent, shares, strict=True)
    ]


def _by_link(mesh: Mesh, axis: int, size: int) -> float:
    """Microseconds of latency and of bandwidth for ``size`` bytes on the links of an axis."""
    link = mesh.link(axis)
    return link.latency + 1e6 * size / link.bandwidth


def buffer_shape(step: Step, layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Shape of a rank's input to the collective: ceil sizes, the blocks for peers stacked on dim 0.

    all_reduce: the local shape. all_gather: the local shape with the gathered dim moved to the front. reduce_scatter: n blocks of the
    result's shape, stacked with the scattered dim in front. all_to_all: (n, *block).
    """
    n = mesh.shape[step.axis]
    before = ceil_shape(shape, layout, mesh.shape)
    after = ceil_shape(shape, step.after(layout), mesh.shape)
    if step.kind == "all_reduce":
        return before
    if step.kind == "all_gather":
        return before or (1,)
    if step.kind == "reduce_scatter":
        return (n * after[0], *after[1:])
    return (n, *exchange_shape(step, layout, shape, mesh))
