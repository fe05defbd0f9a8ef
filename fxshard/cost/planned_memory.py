"""Memory over time of a plan, before anything is lowered: the planning graph at ceil sizes, the rank with the largest shards.

An estimate of what ``cost.memory`` counts on the lowered graph. A value lives in each layout in which it is held; a redistributed
one from its first reader to its last. What a neutral operator's kernel takes meanwhile is workspace of its node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from fxshard._torch_compat import FakeTensorMode, pytree, storage_key
from fxshard.cost.lives import End, Lives
from fxshard.cost.optimizer_state import Optimizer
from fxshard.cost.recorder import MemoryRecorder
from fxshard.layout import Layout, ceil_shape
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun
from fxshard.mesh import Mesh
from fxshard.ops.kernels import KERNELS
from fxshard.planning_graph import UNKNOWN, PlanningGraph, ancestors, is_getitem, operands, outputs_of, plain_shape, source_line
from fxshard.redistribution import Step, exchange_shape, walk
from fxshard.sharding_plan import Redistribution, ShardingPlan


def planned_memory(
    graph: PlanningGraph, plan: ShardingPlan, optimizer: Optimizer | str = "none", stages: Sequence[fx.Graph] | None = None
) -> MemoryProfile:
    """What a device holds over time under ``plan``.

    ``stages``: the forward and the backward, their nodes named as in ``graph``; what the backward is not handed it computes again.
    By default nothing is computed twice: the backward is what the results of the forward do not need.
    """
    walked = _Walk(graph, plan)
    if stages is None:
        early = ancestors(_returned(graph, False))
        for nodes in ([n for n in graph.nodes if n in early], [n for n in graph.nodes if n not in early]):
            walked.run(nodes, None)
    else:
        for stage in stages:
            walked.run(stage.nodes, {n.name for n in stage.nodes if n.op == "placeholder"})
    settings = Optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    return walked.lives.profile({"optimizer": optimizer_state(graph, plan, settings)})


def local_bytes(value: torch.Tensor, layout: Layout, mesh: Mesh) -> int:
    """Bytes of the largest shard of ``value``; UNKNOWN where only running tells."""
    shape = plain_shape(value.shape)
    return UNKNOWN if UNKNOWN in shape else math.prod(ceil_shape(shape, layout, mesh.shape)) * value.dtype.itemsize


def optimizer_state(graph: PlanningGraph, plan: ShardingPlan, optimizer: Optimizer) -> int:
    """Bytes of the optimiser's state of every parameter's shard that has a gradient."""
    graded = {o.name for o in graph.outputs if o.kind == "gradient"}
    ends = [end for end in graph.inputs_of("parameter") if end.name in graded]
    values = [(graph.by_name[end.node].meta["val"], plan.specs[end.node].outputs[0]) for end in ends]
    sizes = (local_bytes(v, layout, plan.mesh) // v.dtype.itemsize * optimizer.bytes_per_element(v.dtype) for v, layout in values)
    return sum(sizes)


def workspace(node: fx.Node) -> int:
    """Bytes that the kernel of a neutral operator takes at most beyond its operands and results, on whole tensors, on the CPU.

    Learned by running it on fake tensors; 0 for torch's own operators, of whose kernels nothing is known. A shard takes its share.
    """
    if node.target not in KERNELS or any(UNKNOWN in plain_shape(t.shape) for t in _around(node)):
        return 0
    return _taken(node.target, _plain(node.args), tuple((name, _plain(value)) for name, value in node.kwargs.items()))


@dataclass(frozen=True)
class _Like:
    """Stands for a tensor, so that calls alike are one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def _plain(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        return _Like(tuple(value.shape), value.stride(), value.dtype)
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


@lru_cache(maxsize=4096)
def _taken(target: Any, args: Any, kwargs: Any) -> int:
    with FakeTensorMode(), torch.no_grad():
        given = pytree.tree_map_only(_Like, lambda x: torch.empty_strided(x.shape, x.strides, dtype=x.dtype), (args, dict(kwargs)))
        with MemoryRecorder(t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)) as recorder:
            result = KERNELS[target](*given[0], **given[1])
        return recorder.peak - recorder.alive if result is not None else 0


def buffers(move: Redistribution, mesh: Mesh) -> Iterator[tuple[Step, int]]:
    """(step, bytes) of what ``passes.emit`` makes, one from the other, from the value that is moved to the result.

    Where the dim is not the first one, pieces are stacked before they are sent, or put in place after.
    """
    for layout, step, after in walk(move.source, move.steps):
        before, written = (math.prod(ceil_shape(move.shape, at, mesh.shape)) * move.itemsize for at in (layout, after))
        if step.kind == "all_gather" and isinstance(step.source, Shard) and step.source.dim:
            yield step, before * mesh.shape[step.axis]
        elif step.kind == "reduce_scatter" and isinstance(step.target, Shard) and step.target.dim:
            yield step, before
        elif step.kind == "all_to_all":
            block = math.prod(exchange_shape(step, layout, move.shape, mesh)) * move.itemsize
            yield from [(step, mesh.shape[step.axis] * block)] * 2
        yield step, written


@dataclass
class _Walk:
    """Goes through the steps; a piece is known by the value's name and the layout in which it is held."""

    graph: PlanningGraph
    plan: ShardingPlan
    lives: Lives = field(default_factory=Lives)
    stage: int = -1
    moved: set[tuple[str, Layout]] = field(default_factory=set)
    """What collectives gave: it is never computed again."""

    @cached_property
    def moves(self) -> dict[tuple[str, Layout], Redistribution]:
        return {(r.value, r.target): r for r in self.plan.redistributions}

    def run(self, nodes: Iterable[fx.Node], handed: set[str] | None) -> None:
        self.stage += 1
        places = None if handed is None else {*self.moved, *((n, layout) for n in handed for layout in self._layouts(n))}
        self.lives.begin_stage(places)
        ends = {end.node: end for end in self.graph.inputs}
        for node in nodes:
            if node.name in ends:
                self._given(self.graph.by_name[node.name], ends[node.name])
            elif node.op == "call_function" and not is_getitem(node):
                self._step(self.graph.by_name[node.name])
        self._results(gradients=self.stage > 0)

    def _layouts(self, name: str) -> list[Layout]:
        node = self.graph.by_name.get(name)
        if node is None:
            return []
        spec = self.plan.specs[node.args[0].name if is_getitem(node) else name]
        return [spec.outputs[node.args[1] if is_getitem(node) else 0]]

    def _given(self, node: fx.Node, end: Any) -> None:
        layout = self.plan.specs[node.name].outputs[0]
        kind = end.kind if end.kind in ("parameter", "buffer") else "input"
        self.lives.give((node.name, layout), self._held(node.meta["val"], node, layout, kind, end.name))

    def _held(self, value: torch.Tensor, node: fx.Node, layout: Layout, kind: str, name: str = "") -> HeldTensor:
        shape, size = ceil_shape(plain_shape(value.shape), layout, self.plan.mesh.shape), local_bytes(value, layout, self.plan.mesh)
        return HeldTensor(name or node.name, kind, size, shape, str(value.dtype), 0, 0, str(layout), source_line(node) or "")

    def _step(self, node: fx.Node) -> None:
        spec = self.plan.specs[node.name]
        read = list(zip(operands(node), spec.inputs, strict=True))
        for operand, layout in read:
            self._move(operand, layout)
        self.lives.step(StepRun(node.name, str(node.target), source_line(node) or "", self._share(node)))
        for operand, layout in read:
            self.lives.read((operand.name, layout))
        values = [(node, 0)] if isinstance(node.meta.get("val"), torch.Tensor) else [(u, int(u.args[1])) for u in node.users]
        for held, index in values:
            self._result(held, outputs_of(node)[index], spec.outputs[index], read)

    def _share(self, node: fx.Node) -> int:
        """The workspace of the kernel on shards: in proportion to what it reads and writes."""
        whole = workspace(node)
        if not whole:
            return 0
        spec = self.plan.specs[node.name]
        pairs = [*zip((o.meta["val"] for o in operands(node)), spec.inputs, strict=True), *zip(outputs_of(node), spec.outputs, strict=True)]
        held = [(local_bytes(v, layout, self.plan.mesh), v.numel() * v.dtype.itemsize) for v, layout in pairs if v is not None]
        return whole * sum(part for part, _ in held) // max(sum(all_ for _, all_ in held), 1)

    def _result(self, held: fx.Node, value: torch.Tensor | None, layout: Layout, read: list[tuple[fx.Node, Layout]]) -> None:
        """A view of an operand, or new."""
        if value is None:
            return
        base = next(((o.name, at) for o, at in read if storage_key(o.meta["val"]) == storage_key(value)), None)
        if base is None:
            self.lives.make((held.name, layout), self._held(value, held, layout, "temporary"))
        elif (held.name, layout) not in self.lives:
            self.lives.share((held.name, layout), base)

    def _move(self, operand: fx.Node, layout: Layout) -> None:
        """Brings ``operand`` into ``layout``, unless it is there."""
        place = operand.name, layout
        if place in self.lives:
            return
        move = self.moves[place]
        held = self._held(operand.meta["val"], operand, layout, "temporary")
        before: Any = operand.name, move.source
        for number, (step, size) in enumerate(made := list(buffers(move, self.plan.mesh))):
            self.lives.step(StepRun(operand.name, f"{step.kind} {self.plan.mesh.axis_names[step.axis]}", held.source))
            self.lives.read(before)
            before = place if number == len(made) - 1 else (*place, number)
            self.lives.make(before, replace(held, bytes=size, kind="gathered" if step.is_collective else held.kind))
        if any(step.is_collective for step in move.steps):
            self.moved.add(place)

    def _results(self, gradients: bool) -> None:
        for operand, layout, end in _ends(self.graph, self.plan):
            if (end.kind == "gradient") == gradients:
                self._move(operand, layout)
                self.lives.keep((operand.name, layout), End(end.kind, end.name, str(layout)))


def _ends(graph: PlanningGraph, plan: ShardingPlan) -> Iterator[tuple[fx.Node, Layout, Any]]:
    return zip(operands(graph.module.graph.output_node()), plan.specs["output"].inputs, graph.outputs, strict=True)


def _returned(graph: PlanningGraph, gradients: bool) -> list[fx.Node]:
    nodes = operands(graph.module.graph.output_node())
    return [n for n, end in zip(nodes, graph.outputs, strict=True) if (end.kind == "gradient") == gradients]


def _around(node: fx.Node) -> list[torch.Tensor]:
    return [*(o.meta["val"] for o in operands(node)), *(v for v in outputs_of(node) if v is not None)]
