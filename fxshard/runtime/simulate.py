"""simulate: all ranks of a program in one process, in lock-step, collectives computed exactly."""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxshard._torch_compat import pytree
from fxshard.errors import RunError
from fxshard.mesh import Mesh
from fxshard.program import KINDS, ShardedProgram, is_wait
from fxshard.runtime.shards import gather, scatter


@dataclass(frozen=True)
class Issued:
    """A collective as a rank hands it over: ``op`` is the reduction (empty where there is none)."""

    kind: str
    axis: str
    op: str
    tensor: torch.Tensor
    node: str

    @property
    def signature(self) -> tuple[Any, ...]:
        return self.kind, self.axis, self.op, tuple(self.tensor.shape), str(self.tensor.dtype)


@dataclass(frozen=True)
class Recorded:
    """A collective that really ran, as rank 0 saw it: ``shape`` and ``dtype`` of the buffer handed in."""

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    node: str


@dataclass
class Simulation:
    """``outputs``: as the model returns them, global; ``grads``: by parameter (and input) name; ``mutations``: new values
    of buffers by name; ``collectives``: what ran, in order."""

    outputs: Any
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    mutations: dict[str, torch.Tensor] = field(default_factory=dict)
    collectives: list[Recorded] = field(default_factory=list)


Rank = Generator[Issued, torch.Tensor, tuple[torch.Tensor, ...]]


def run_rank(module: fx.GraphModule, inputs: Sequence[torch.Tensor], index: Mapping[str, int]) -> Rank:
    """Runs one rank's graph eagerly; yields each collective and is sent its result."""
    values: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    last_use = _last_uses(module)
    for node in module.graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "output":
            return tuple(args[0])
        elif node.target in KINDS:
            kind = KINDS[node.target]
            reduction = args[1] if kind in ("all_reduce", "reduce_scatter") else ""
            values[node] = yield Issued(kind, args[-1], reduction, args[0], node.name)
        elif is_wait(node):
            values[node] = args[0]
        elif node.target is torch.ops.fxshard.axis_index.default:
            values[node] = torch.tensor(index[args[0]])
        else:
            values[node] = node.target(*args, **kwargs)
        for dead in last_use.get(node, ()):
            del values[dead]
    raise AssertionError("a graph without output")


def _last_uses(module: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values that nobody needs after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(module.graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last


def run_lockstep(
    program: ShardedProgram, inputs: Mapping[tuple[int, ...], Sequence[torch.Tensor]]
) -> tuple[dict[tuple[int, ...], Any], list[Recorded]]:
    """Runs all ranks from one collective to the next; raises RunError when ranks of a group issue different ones."""
    mesh = program.mesh
    ranks = {c: run_rank(program.local(c), inputs[c], dict(zip(mesh.axis_names, c, strict=True))) for c in mesh.coordinates()}
    results: dict[tuple[int, ...], Any] = {}
    recorded: list[Recorded] = []
    reply: dict[tuple[int, ...], torch.Tensor | None] = dict.fromkeys(ranks)
    while True:
        issued: dict[tuple[int, ...], Issued] = {}
        for coordinate, rank in ranks.items():
            if coordinate in results:
                continue
            try:
                issued[coordinate] = rank.send(reply[coordinate])
            except StopIteration as stop:
                results[coordinate] = stop.value
        if not issued:
            return results, recorded
        check_agreement(mesh, issued)
        first = next(iter(issued.values()))
        recorded.append(Recorded(first.kind, first.axis, tuple(first.tensor.shape), str(first.tensor.dtype), first.node))
        reply = dict(communicate(mesh, issued))


def check_agreement(mesh: Mesh, issued: Mapping[tuple[int, ...], Issued]) -> None:
    """Raises RunError naming two ranks and their collectives unless all ranks issue the same one."""
    reference = next(iter(issued))
    for coordinate in mesh.coordinates():
        mine = issued.get(coordinate)
        if mine is None or mine.signature != issued[reference].signature:
            what = "has ended" if mine is None else f"issues {mine.signature} at node {mine.node}"
            other = issued[reference]
            theirs = f"rank {mesh.rank(reference)} issues {other.signature} at node {other.node}"
            raise RunError(
                f"ranks disagree: rank {mesh.rank(coordinate)} {what}, {theirs}",
                remedy="all ranks must run programs lowered from one plan",
            )


def communicate(mesh: Mesh, issued: Mapping[tuple[int, ...], Issued]) -> dict[tuple[int, ...], torch.Tensor]:
    """The result of one collective on each rank, group by group."""
    axis = mesh.axis(next(iter(issued.values())).axis)
    results: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate in mesh.coordinates():
        if coordinate[axis] == 0:
            group = [mesh.coordinate(r) for r in mesh.group(axis, coordinate)]
            outcome = _collective(issued[group[0]], [issued[c].tensor for c in group])
            results.update(zip(group, outcome, strict=True))
    return results


def _collective(call: Issued, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    n = len(tensors)
    if call.kind == "all_reduce":
        total = reduce_tensors(tensors, call.op)
        return [total.clone() for _ in tensors]
    if call.kind == "all_gather":
        whole = torch.cat(tensors)
        return [whole.clone() for _ in tensors]
    if call.kind == "reduce_scatter":
        return list(reduce_tensors(tensors, call.op).clone().chunk(n))
    blocks = [t.chunk(n) for t in tensors]
    return [torch.cat([blocks[source][target] for source in range(n)]) for target in range(n)]


def reduce_tensors(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """Sum, product, maximum or minimum over ranks, in rank order."""
    combine = {"sum": operator.add, "product": operator.mul, "max": torch.maximum, "min": torch.minimum}[op]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    return total


def simulate_program(program: ShardedProgram, values: Sequence[torch.Tensor]) -> Simulation:
    """Runs ``program`` on all ranks; ``values`` are global tensors in the order of ``program.inputs``."""
    mesh = program.mesh
    inputs = {c: [scatter(v, layout, mesh, c) for v, layout in zip(values, program.input_layouts, strict=True)] for c in mesh.coordinates()}
    with torch.no_grad():
        results, recorded = run_lockstep(program, inputs)
    whole = [
        gather({c: r[k] for c, r in results.items()}, layout, shape, mesh)
        for k, (layout, shape) in enumerate(zip(program.output_layouts, program.output_shapes, strict=True))
    ]
    return package(program, whole, recorded)


def package(program: ShardedProgram, whole: Sequence[torch.Tensor], recorded: list[Recorded]) -> Simulation:
    """Global results by what they are."""
    named: dict[str, dict[str, torch.Tensor]] = {"output": {}, "gradient": {}, "mutation": {}}
    for end, value in zip(program.outputs, whole, strict=True):
        named[end.kind][end.name] = value
    outputs = pytree.tree_unflatten(list(named["output"].values()), program.out_spec)
    grads = dict(named["gradient"])
    grads.update({alias: grads[name] for alias, name in program.aliases.items() if name in grads})
    return Simulation(outputs, grads, named["mutation"], recorded)
