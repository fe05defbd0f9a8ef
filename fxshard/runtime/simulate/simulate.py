"""simulate: runs all ranks of a program in one process, in lock-step, and computes collectives by their definitions."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat import pytree
from fxshard.errors import OptionError, RunError
from fxshard.graph.planning_graph import source_line
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.ops.mesh_ops import zigzag_peers
from fxshard.program.sharded_program import KINDS, ShardedProgram, is_wait
from fxshard.runtime.simulate.per_rank import RankValues
from fxshard.runtime.simulate.reductions import reduce_tensors, scatter_tensors
from fxshard.runtime.simulate.shards import gather, scatter

MAX_RANKS = 64
ROWS = ("dispatch", "combine")
"""All-to-alls of rows of experts, as many as data says."""
BACK = "back"
"""The ``op`` of a zigzag that moves blocks back."""


@dataclass(frozen=True)
class IssuedCollective:
    """A collective that a rank issues.

    ``op``: the reduction, "" without one, ``BACK`` for a zigzag back; ``splits``: of an all-to-all, (rows to each rank of the group, rows
    from each); ``where``: the user's source line.
    """

    kind: str
    axis: str
    op: str
    tensor: torch.Tensor
    node: str
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    where: str | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """The part that must be equal on all ranks; in an all-to-all, the number of rows may differ."""
        shape = tuple(self.tensor.shape)
        return self.kind, self.axis, self.op, shape if self.splits is None else ("*", *shape[1:]), str(self.tensor.dtype)

    def __str__(self) -> str:
        return f"{self.signature} at node {self.node}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Recorded:
    """A collective that ran, as rank 0 issued it; ``shape`` and ``dtype`` are those of its input buffer."""

    kind: str
    axis: str
    shape: tuple[int, ...]
    dtype: str
    node: str


@dataclass
class Simulation:
    """Global results. ``outputs``: in the model's structure; ``grads``: by parameter (and input) name; ``mutations``: new values of
    buffers by name; ``collectives``: those that ran, in order; ``ranks``: each rank's local parts of all these, by name
    (``"outputs[0]"``, a parameter's name, a buffer's)."""

    outputs: Any
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    mutations: dict[str, torch.Tensor] = field(default_factory=dict)
    collectives: list[Recorded] = field(default_factory=list)
    ranks: dict[str, RankValues] = field(default_factory=dict)


RankRun = Generator[IssuedCollective, torch.Tensor, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Step:
    """A node of a local graph, its kind, and the values that die after it."""

    node: fx.Node
    kind: str
    dead: tuple[fx.Node, ...]
    where: str | None


def steps_of(module: fx.GraphModule) -> list[Step]:
    """The steps of a graph, computed once for all ranks that share it."""
    seen: set[fx.Node] = set()
    steps = []
    for node in reversed(module.graph.nodes):
        dead = [used for used in node.all_input_nodes if used not in seen]
        seen.update(dead)
        if node.op == "call_function" and node not in seen:
            dead.append(node)  # it has no users
        kind = _kind(node)
        steps.append(Step(node, kind, tuple(dead), source_line(node) if kind == "collective" else None))
    return steps[::-1]


def _kind(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    if node.target is torch.ops.fxshard.axis_index.default:
        return "axis_index"
    return "collective" if node.target in KINDS else "wait" if is_wait(node) else "call"


def run_rank(steps: Sequence[Step], inputs: Sequence[torch.Tensor], index: Mapping[str, int]) -> RankRun:
    """A generator that runs one rank's graph eagerly; yields each collective and receives its result."""
    values: dict[fx.Node, Any] = {}
    feed = iter(inputs)
    for step in steps:
        node = step.node
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if step.kind == "placeholder":
            values[node] = next(feed)
        elif step.kind == "output":
            return tuple(args[0])
        elif step.kind == "collective":
            values[node] = _padded(step, args, (yield _issued(step, args)))
        elif step.kind == "wait":
            values[node] = args[0]
        elif step.kind == "axis_index":
            values[node] = torch.tensor(index[args[0]])
        else:
            values[node] = node.target(*args, **kwargs)
        for dead in step.dead:
            del values[dead]
    raise AssertionError("a graph without output")


def _issued(step: Step, args: Sequence[Any]) -> IssuedCollective:
    kind = KINDS[step.node.target]
    reduction = args[1] if kind in ("all_reduce", "reduce_scatter") else BACK if kind == "zigzag" and args[1] else ""
    splits = (tuple(args[2]), tuple(args[1])) if kind == "all_to_all" else None
    if kind in ROWS:
        splits = tuple(args[1].tolist()), tuple(args[2].tolist())
    return IssuedCollective(kind, args[-1], reduction, args[0], step.node.name, splits, step.where)


def _padded(step: Step, args: Sequence[Any], arrived: torch.Tensor) -> torch.Tensor:
    """What arrived, dense as from a process group; rows of experts are the first of a buffer, whose other rows are undefined: here NaN, so
    that reading them shows."""
    if KINDS[step.node.target] not in ROWS:
        return arrived.contiguous()
    return torch.cat([arrived, arrived.new_full((args[3] - len(arrived), *arrived.shape[1:]), math.nan)])


def run_lockstep(
    program: ShardedProgram, inputs: Mapping[tuple[int, ...], Sequence[torch.Tensor]], reduction: str = "exact"
) -> tuple[dict[tuple[int, ...], Any], list[Recorded]]:
    """(results, collectives): runs all ranks from one collective to the next; raises RunError if ranks issue different ones."""
    mesh = program.mesh
    shared: dict[fx.GraphModule, list[Step]] = {}
    ranks = {}
    for c in mesh.coordinates():
        module = program.local(c)
        if module not in shared:
            shared[module] = steps_of(module)
        ranks[c] = run_rank(shared[module], inputs[c], dict(zip(mesh.axis_names, c, strict=True)))
    results: dict[tuple[int, ...], Any] = {}
    recorded: list[Recorded] = []
    reply: dict[tuple[int, ...], torch.Tensor | None] = dict.fromkeys(ranks)
    while True:
        issued: dict[tuple[int, ...], IssuedCollective] = {}
        for coordinate, rank in ranks.items():
            if coordinate in results:
                continue
            try:
                issued[coordinate] = rank.send(reply.pop(coordinate))
            except StopIteration as stop:
                results[coordinate] = stop.value
        if not issued:
            return results, recorded
        check_agreement(mesh, issued, len(recorded))
        first = next(iter(issued.values()))
        recorded.append(Recorded(first.kind, first.axis, tuple(first.tensor.shape), str(first.tensor.dtype), first.node))
        reply = dict(run_collective(mesh, issued, reduction))


def check_agreement(mesh: Mesh, issued: Mapping[tuple[int, ...], IssuedCollective], count: int) -> None:
    """Raises RunError, with two ranks and their collectives, unless all issue the same one; ``count``: how many agreed before."""
    reference = next(iter(issued))
    other = issued[reference]
    for coordinate in mesh.coordinates():
        mine = issued.get(coordinate)
        if mine is None or mine.signature != other.signature:
            what = "has ended" if mine is None else f"issues {mine}"
            raise RunError(
                f"ranks disagree: rank {mesh.rank(coordinate)} {what}, rank {mesh.rank(reference)} issues {other}",
                where=f"after {count} collectives that agreed, on mesh {mesh}",
                remedy="all ranks must run programs lowered from one plan; real ranks would wait for each other forever",
            )


def run_collective(
    mesh: Mesh, issued: Mapping[tuple[int, ...], IssuedCollective], reduction: str = "exact"
) -> dict[tuple[int, ...], torch.Tensor]:
    """The result of one collective on each rank, computed group by group."""
    axis = mesh.axis(next(iter(issued.values())).axis)
    results: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate in mesh.coordinates():
        if coordinate[axis] == 0:
            group = [mesh.coordinate(r) for r in mesh.group(axis, coordinate)]
            calls = [issued[c] for c in group]
            _check_splits(calls, mesh.group(axis, coordinate))
            results.update(zip(group, _collective(calls, reduction), strict=True))
    return results


def _check_splits(calls: Sequence[IssuedCollective], ranks: Sequence[int]) -> None:
    """Raises RunError if a rank of an all-to-all sends a peer more or fewer rows than the peer expects."""
    for i, sender in enumerate(calls):
        for j, taker in enumerate(calls):
            if sender.splits is None or taker.splits is None:
                continue
            sent, taken = sender.splits[0][j], taker.splits[1][i]
            if sent != taken:
                what = f"rank {ranks[i]} sends {sent} rows to rank {ranks[j]}, which takes {taken}"
                raise RunError(f"ranks disagree: {what}, at node {sender.node}", where=sender.where, remedy="please report it")


def _collective(calls: Sequence[IssuedCollective], reduction: str) -> list[torch.Tensor]:
    call, tensors = calls[0], [c.tensor for c in calls]
    n = len(tensors)
    if call.kind == "all_reduce":
        total = reduce_tensors(tensors, call.op, reduction)
        return [total.clone() for _ in tensors]
    if call.kind == "all_gather":
        whole = torch.cat(tensors)
        return [whole.clone() for _ in tensors]
    if call.kind == "reduce_scatter":
        return scatter_tensors(tensors, call.op, reduction)
    if call.kind == "shift":
        return [tensors[source - 1].clone() for source in range(n)]
    if call.kind == "zigzag":
        return _zigzag(tensors, call.op == BACK)
    blocks = [c.tensor[: sum(c.splits[0])].split(c.splits[0]) for c in calls if c.splits is not None]
    return [torch.cat([blocks[source][target] for source in range(n)]) for target in range(n)]


def _zigzag(tensors: Sequence[torch.Tensor], back: bool) -> list[torch.Tensor]:
    """Each rank's two halves, in the order of the ranks that send them."""
    sent = [zigzag_peers(rank, len(tensors), back)[0] for rank in range(len(tensors))]
    halves = [
        [part for to, parts in zip(sent, tensors, strict=True) for peer, part in zip(to, parts, strict=True) if peer == rank]
        for rank in range(len(tensors))
    ]
    return [torch.stack(own) for own in halves]


def check_ranks(mesh: Mesh) -> None:
    """Raises OptionError for a mesh of more than ``MAX_RANKS`` ranks."""
    if mesh.size > MAX_RANKS:
        what = f"mesh {mesh} has {mesh.size} ranks, the simulator runs up to {MAX_RANKS} in one process"
        raise OptionError(what, remedy="simulate a smaller mesh with the same axes; planning needs no ranks at all")


def simulated_mesh(mesh: Mesh | DeviceMesh) -> Mesh:
    """``mesh`` without its process groups; raises OptionError if it has too many ranks."""
    plain = as_mesh(mesh)
    check_ranks(plain)
    return plain


def simulate_program(program: ShardedProgram, values: Sequence[torch.Tensor], reduction: str = "exact") -> Simulation:
    """Runs ``program`` on all ranks; ``values`` are global tensors in the order of ``program.inputs``."""
    mesh = program.mesh
    check_ranks(mesh)
    inputs = {c: [scatter(v, layout, mesh, c) for v, layout in zip(values, program.input_layouts, strict=True)] for c in mesh.coordinates()}
    with torch.no_grad():
        results, recorded = run_lockstep(program, inputs, reduction)
    ranks = [RankValues(mesh, tuple(results[c][k] for c in mesh.coordinates())) for k in range(len(program.outputs))]
    ends = zip(ranks, program.output_layouts, program.output_shapes, strict=True)
    whole = [gather(dict(zip(mesh.coordinates(), own, strict=True)), layout, shape, mesh) for own, layout, shape in ends]
    return simulation_of(program, whole, recorded, ranks)


def simulation_of(
    program: ShardedProgram, whole: Sequence[torch.Tensor], recorded: list[Recorded], ranks: Sequence[RankValues]
) -> Simulation:
    """A Simulation from the global results ``whole`` and the local ones ``ranks``."""
    named: dict[str, dict[str, torch.Tensor]] = {"output": {}, "gradient": {}, "mutation": {}}
    for end, value in zip(program.outputs, whole, strict=True):
        named[end.kind][end.name] = value
    outputs = pytree.tree_unflatten(list(named["output"].values()), program.out_spec)
    grads = dict(named["gradient"])
    grads.update({alias: grads[name] for alias, name in program.aliases.items() if name in grads})
    own = {end.name: values for end, values in zip(program.outputs, ranks, strict=True)}
    return Simulation(outputs, grads, named["mutation"], recorded, own)
