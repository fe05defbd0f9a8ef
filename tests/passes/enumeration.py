"""Small real aten graphs, and the least cost of any plan for them by enumeration.

The enumeration tries every spec of every node, in graph order, and adds up the costs: the compute of each node, and the redistribution of
each distinct (value, target layout) once, less the time that compute hides. A branch is abandoned only if its cost so far, plus the least
compute of the remaining nodes, reaches the best cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import torch
from passes.memory_truth import peak_memory
from passes.overlap_truth import Truth
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import fxshard.ops  # noqa: F401
from fxshard.cost import node_time, time_price
from fxshard.graph.planning_graph import GraphInput, GraphOutput, PlanningGraph, operands, producer
from fxshard.layout.layouts import Layout, all_layouts
from fxshard.layout.redistribution import bytes_price, path_price, sent_bytes, steps, walk
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan

aten, ops = torch.ops.aten, torch.ops.fxshard
TOY = Hardware("toy", {4: 1e8}, 1e8, 0.5, 64, Link(3e8, 0.1), Link(3e8, 0.1))
"""Communication and compute of tensors of a few dozen elements cost about the same."""
FAST = Hardware("fast", {4: 1e8}, 1e8, 0.0, 64, Link(3e9, 0.0), Link(3e9, 0.0))
"""Communication costs a fraction of compute, so that layouts change often."""


def build(
    shapes: Sequence[tuple[int, ...]], calls: Sequence[tuple[Any, ...]], outputs: Sequence[int], parameters: int = 0
) -> PlanningGraph:
    """The graph of ``calls``. Its values are numbered: first the inputs with ``shapes`` (the last ``parameters`` of them are parameters),
    then the result of each call; ``outputs`` are such numbers.

    A call is (operator, numbers of its operands..., further arguments as ``Const``).
    """
    graph, mode = fx.Graph(), FakeTensorMode()
    values: list[fx.Node] = []
    ends = []
    for i, shape in enumerate(shapes):
        kind = "parameter" if i >= len(shapes) - parameters else "input"
        node = graph.placeholder(f"{kind}_{i}")
        with mode:
            node.meta["val"] = torch.empty(shape)
        values.append(node)
        ends.append(GraphInput(node.name, kind, f"w{i}" if kind == "parameter" else f"args[{i}]"))
    for target, *args in calls:
        args = [a.value if isinstance(a, Const) else values[a] for a in args]
        node = graph.call_function(target, tuple(args))
        with mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        values.append(node)
    node = graph.output(tuple(values[o] for o in outputs))
    results = tuple(GraphOutput("output", f"outputs[{k}]") for k in range(len(outputs)))
    spec_in = pytree.tree_structure((tuple(range(len(shapes) - parameters)), {}))
    return PlanningGraph(fx.GraphModule({}, graph), tuple(ends), results, spec_in, pytree.tree_structure(tuple(outputs)), train=False)


@dataclass(frozen=True)
class Const:
    """An argument that is no tensor."""

    value: Any


@st.composite
def graphs(draw: st.DrawFn, most: int = 6, parameters: int = 0) -> PlanningGraph:
    """Up to ``most`` calls on square matrices, so that any value fits any operand. Sums give vectors, which are only added.

    Four ranks shard the sizes without empty shards, since a layout with an empty shard is used only if it is pinned.
    """
    size = draw(st.sampled_from([4, 7, 8]))
    count = draw(st.integers(max(1, parameters), 3))
    vectors: list[int] = []
    matrices = list(range(count))
    calls: list[tuple[Any, ...]] = []
    for number in range(count, count + draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["einsum", "add", "relu", "sum", "vector"]))
        one, two = draw(st.sampled_from(matrices)), draw(st.sampled_from(matrices))
        if kind == "einsum":
            calls.append((ops.einsum.default, one, two, Const(draw(st.sampled_from(["mk,kn->mn", "mk,nk->mn", "km,kn->mn"])))))
        elif kind == "add":
            calls.append((aten.add.Tensor, one, two))
        elif kind == "relu":
            calls.append((aten.relu.default, one))
        elif kind == "sum" or not vectors:
            calls.append((aten.sum.dim_IntList, one, Const([draw(st.integers(0, 1))])))
            vectors.append(number)
            continue
        else:
            calls.append((aten.add.Tensor, one, draw(st.sampled_from(vectors))))
        matrices.append(number)
    last = count + len(calls) - 1
    more = draw(st.lists(st.integers(count, last), max_size=1))
    return build([(size, size)] * count, calls, list(dict.fromkeys([last, *more])), parameters)


@dataclass
class Enumeration:
    """All choices for an annotated graph. ``keep`` (by node name) and ``keep_result`` (by index) tell which ones the constraints allow."""

    annotated: Annotated
    objective: str = "time"
    keep: Callable[[str, OpSpec], bool] = lambda name, spec: True
    keep_result: Callable[[int, Layout], bool] = lambda index, layout: True
    memory_limit: int | None = None
    count: Callable[..., int] = peak_memory
    alike: Sequence[Collection[str]] = ()
    """Groups of nodes and results (``outputs[0]``) that must have equal layouts."""
    at_most: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a rank may send on an axis."""
    nodes: list[fx.Node] = field(init=False)
    result_layouts: list[Layout] = field(init=False)
    """The layouts in which results are returned."""
    twins: list[str | None] = field(init=False)
    """For each result the input that must have the same layout: a gradient's parameter, an output's tangent."""

    def __post_init__(self) -> None:
        graph, mesh = self.annotated.graph, self.annotated.mesh
        self.price = time_price(mesh) if self.objective == "time" else bytes_price
        self.truth = Truth(self.annotated)
        self.nodes = [n for n in graph.nodes if n.op != "output"]
        self.returned = operands(graph.module.graph.output_node())
        self.result_layouts = [Layout.parse("R" * mesh.ndim)] * len(self.returned)
        self.options: list[list[tuple[OpSpec, float]]] = []
        for node in self.nodes:
            call = self.annotated.calls.get(node.name)
            timed = call is not None and self.objective == "time"
            specs = [s for s in self.annotated.specs[node.name] if self.keep(node.name, s)]
            self.options.append(sorted(((s, node_time(call, s, mesh) if timed else 0.0) for s in specs), key=lambda o: o[1]))
        for k, node in enumerate(self.returned):
            legal = all_layouts(node.meta["val"].dim(), mesh.shape, reduce_ops=())
            self.options.append([(OpSpec((layout,), ()), 0.0) for layout in legal if self.keep_result(k, layout)])
        named = {end.name: end.node for end in graph.inputs if end.kind != "tangent"} | {
            end.name.replace("tangents", "outputs"): end.node for end in graph.inputs_of("tangent")
        }
        self.twins = [named.get(end.name) for end in graph.outputs]
        least = [min((c for _, c in o), default=0.0) for o in self.options]
        self.remaining = list(itertools.accumulate(reversed(least), initial=0.0))[::-1]

    def least(self, bound: float) -> float:
        """The least cost below ``bound``, or ``bound`` if there is none."""
        self.best, self.specs, self.paid = bound, {}, set()
        self.chosen_layouts: dict[str, Layout] = {}
        self._descend(0, 0.0, (0,) * self.annotated.mesh.ndim)
        return self.best

    def _descend(self, i: int, cost: float, sent: tuple[int, ...]) -> None:
        if cost + self.remaining[i] >= self.best:
            return
        if i == len(self.options):
            if self.memory_limit is None or self.held() <= self.memory_limit:
                self.best = cost
            return
        node = self.nodes[i] if i < len(self.nodes) else None
        reads = operands(node) if node is not None else (self.returned[i - len(self.nodes)],)
        twin = None if node is not None else self.twins[i - len(self.nodes)]
        name = node.name if node is not None else f"outputs[{i - len(self.nodes)}]"
        for spec, compute in self.options[i]:
            if twin is not None and self.specs[twin].outputs[0] != spec.inputs[0]:
                continue
            if not self._alike(name, (spec.outputs or spec.inputs)[0]):
                continue
            if node is not None:
                self.specs[node.name] = spec
            else:
                self.result_layouts[i - len(self.nodes)] = spec.inputs[0]
            new = {(o.name, want): self._price(o, want) for o, want in zip(reads, spec.inputs, strict=True)}
            new = {key: price for key, price in new.items() if key not in self.paid}
            moves = {(o, want) for o, want in zip(reads, spec.inputs, strict=True) if (o.name, want) in new}
            after = self._sent(sent, moves) if self.at_most else sent
            if any(after[self.annotated.mesh.axis(axis)] > most for axis, most in self.at_most.items()):
                continue
            self.paid |= new.keys()
            self._descend(i + 1, cost + compute + sum(new.values()), after)
            self.paid -= new.keys()
        self.chosen_layouts.pop(name, None)

    def held(self) -> int:
        """Bytes of memory that the present choices need."""
        return self.count(self.annotated.graph, self.specs, self.result_layouts, self.annotated.mesh, self.price)

    def _alike(self, name: str, layout: Layout) -> bool:
        """Records the layout of ``name``; whether all values chosen so far that must have the same layout do."""
        self.chosen_layouts.pop(name, None)
        others = [other for group in self.alike if name in group for other in group]
        self.chosen_layouts[name] = layout
        return all(self.chosen_layouts.get(other, layout) == layout for other in others)

    def _price(self, operand: fx.Node, want: Layout) -> float:
        source, index = producer(operand)
        have, value = self.specs[source.name].outputs[index], operand.meta["val"]
        if have == want:
            return 0.0
        price = path_price(have, want, tuple(value.shape), value.dtype.itemsize, self.annotated.mesh, self.price)
        if self.objective != "time":
            return price
        return price - self.truth.saved(self.specs, operand, want) - self.truth.hidden(self.specs, operand, want)

    def _sent(self, sent: tuple[int, ...], moves: Collection[tuple[fx.Node, Layout]]) -> tuple[int, ...]:
        """Bytes sent on each axis, with these redistributions added."""
        total, mesh = list(sent), self.annotated.mesh
        for operand, want in moves:
            source, index = producer(operand)
            have, value = self.specs[source.name].outputs[index], operand.meta["val"]
            shape, itemsize = tuple(value.shape), value.dtype.itemsize
            for layout, step, _ in walk(have, steps(have, want, shape, itemsize, mesh, self.price)):
                total[step.axis] += sent_bytes(step, layout, shape, itemsize, mesh)
        return tuple(total)

    def cost_of(self, plan: ShardingPlan) -> float:
        """The cost of the plan's specs, counted the same way."""
        results = plan.specs["output"].inputs
        chosen = Enumeration(self.annotated, self.objective, lambda n, s: s == plan.specs[n], lambda k, x: x == results[k])
        return chosen.least(float("inf"))


MESHES = (Mesh({"a": 2}, TOY), Mesh({"a": 4}, TOY), Mesh({"a": 2}, FAST), Mesh({"a": 4}, FAST), Mesh({"a": 2}, "h100"))
SQUARE = Mesh({"a": 2, "b": 2}, FAST)
