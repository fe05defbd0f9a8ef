"""The memory profile of a plan over its graph, and the errors if memory does not suffice."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from fxshard.byte_sizes import exact_size, size_text
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.errors import ConstraintError
from fxshard.graph.planning_graph import UNKNOWN, PlanningGraph, operands, plain_shape, planned_nodes, producer, source_line
from fxshard.layout.layouts import Layout, ceil_shape
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.memory.memory_over_time import Allocation, allocations, total_over_time
from fxshard.plans.offload import KINDS
from fxshard.plans.plan_data import AGAIN, OpSpec, Redistribution
from fxshard.shapes import sizes_named
from fxshard.text_table import fitted, in_short

HEAVIEST = 5
"""Number of tensors that a memory error lists."""


def planned_profile(
    times: Lifetimes,
    specs: Mapping[str, OpSpec],
    moves: Sequence[Redistribution],
    mesh: Mesh,
    optimizer: Optimizer,
    on_host: Mapping[str, str] = MappingProxyType({}),
) -> MemoryProfile:
    """Memory of the largest rank while each node of the planning graph runs, at ceil sizes; each node, inputs included, is a step."""
    graph = times.graph
    names, values = _ends(graph), graph.by_name
    tensors, taken = [], Counter[int]()
    for one in allocations(times, specs, moves, mesh, optimizer, on_host):
        if one.layout is None:
            taken[one.span[0]] += one.bytes
        elif one.bytes:
            tensors.append(_tensor(one, one.layout, values[one.value], names, mesh))
    steps = tuple(StepRun(node.name, _op(node), source_line(node) or "", taken[k]) for k, node in enumerate(planned_nodes(graph)))
    unknown = [name for name, node in values.items() if UNKNOWN in plain_shape(getattr(node.meta.get("val"), "shape", ()))]
    return MemoryProfile(tuple(t for t in tensors if t.birth <= t.death), steps, unknown=tuple(unknown))


def memory_at_peak(
    times: Lifetimes,
    specs: Mapping[str, OpSpec],
    moves: Sequence[Redistribution],
    mesh: Mesh,
    optimizer: Optimizer,
    on_host: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Bytes per device at the peak, by kind."""
    found = allocations(times, specs, moves, mesh, optimizer, on_host)
    time, _ = total_over_time(found).peak()
    kinds: dict[str, int] = {}
    for one in found:
        if one.span[0] <= time < one.span[1] and one.bytes:
            kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes
    return kinds


def _tensor(one: Allocation, layout: Layout, node: fx.Node, names: Mapping[str, str], mesh: Mesh) -> HeldTensor:
    value = node.meta["val"]
    shape = ceil_shape(plain_shape(value.shape), layout, mesh.shape)
    line = source_line(node) or source_line(producer(node)[0]) or ""
    name = names.get(one.value) or readable_name(node)
    return HeldTensor(name, one.kind, one.bytes, shape, str(value.dtype), one.span[0], one.span[1] - 1, str(layout), line)


def _ends(graph: PlanningGraph) -> dict[str, str]:
    """The user's names of inputs, gradients and mutated buffers."""
    returned = zip(graph.outputs, operands(graph.module.graph.output_node()), strict=True)
    return {node.name: end.name for end, node in returned} | {end.node: end.name for end in graph.inputs}


def readable_name(node: fx.Node) -> str:
    """Where in the model a value is made, and by which operator: ``layers.0.feed_forward (silu)``; the node's name if unknown."""
    source = producer(node)[0]
    stack, backward = source.meta.get("nn_module_stack") or {}, source.meta.get("fwd_nn_module_stack") or {}
    when = ", again" if source.name.endswith(AGAIN) else "" if stack else ", backward"
    path = next((re.sub(r"^[LG]\['\w+'\]\.?", "", path) for path, _ in reversed((stack or backward).values())), "")
    op = _op(source).rpartition("::")[2].split(".")[1:2] or [source.name]
    return f"{path} ({op[0]}{when})" if path else node.name


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


@dataclass(frozen=True)
class Shortage:
    """The limit, the least memory found and the lower bound, in bytes, with the profile of the plan that needs the least.

    ``sizes``: the sizes of dynamic dims, by name, that it refers to. ``has_state``: whether the optimiser has state.
    ``offload``: what else could be on the host, as in ``fxshard.plan``.
    """

    limit: int
    least: float
    bound: float
    mesh: Mesh
    profile: MemoryProfile | None
    sizes: tuple[tuple[str, int], ...] = ()
    has_state: bool = True
    offload: tuple[str, ...] = KINDS

    @property
    def _where(self) -> str:
        return f" at {sizes_named(self.sizes)}" if self.sizes else ""

    def impossible(self) -> ConstraintError:
        """The error if it is proven that nothing fits."""
        return self._error(f"nothing fits in memory_limit={exact_size(self.limit)} per device{self._where}", "")

    def not_found(self, time_limit: float | None) -> ConstraintError:
        """The error if nothing that fits was found, without a proof."""
        ended = "the solver's own work limit" if time_limit is None else f"time_limit={time_limit:g} s"
        limit = f"memory_limit={exact_size(self.limit)}{self._where}"
        what = f"no plan that fits in {limit} was found, nor a proof that there is none, within {ended}"
        more = "give time_limit=SECONDS" if time_limit is None else "give more time"
        return self._error(what, f"{more}, or ")

    def _error(self, what: str, before: str) -> ConstraintError:
        known = f"no plan takes less than {exact_size(math.floor(self.bound))}, by the count of `plan.memory`"
        raised = f"raise the limit: the least found is {exact_size(math.ceil(self.least))}; {known}"
        smaller = "smaller sizes (the max of their Dims)" if self.sizes else "a smaller batch"
        others = ["Otherwise use a larger mesh", smaller]
        if self.has_state:
            others.append("an optimizer with less state")
        others.append("fewer pins and input_layouts")
        if self.offload:
            given = repr(self.offload[0]) if len(self.offload) == 1 else str(self.offload)
            others.append(f"offload={given} (--offload {','.join(self.offload)}), which holds more on the host")
        remedy = f"{before}{raised}. {', '.join(others[:-1])}, or {others[-1]}"
        return ConstraintError(what, where=f"mesh {self.mesh}{self._heaviest()}", remedy=remedy)

    def _heaviest(self) -> str:
        """The largest tensors at the peak of the plan that needs the least."""
        if self.profile is None:
            return ""
        step = self.profile.steps[self.profile.peak_step]
        place = in_short(step.source) if step.source else f"{step.name} ({step.op})"
        rows = [
            (t.name, t.kind, size_text(t.bytes), t.layout, "x".join(map(str, t.shape)), t.source) for t in self.profile.alive()[:HEAVIEST]
        ]
        table = fitted(rows, ("tensor", "kind", "bytes", "layout", "shard", "line"), same=False)
        return f"; the plan that needs the least reaches its peak at {place}, most of it in\n    " + table.replace("\n", "\n    ")
