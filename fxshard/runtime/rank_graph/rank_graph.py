"""rank_graph: the graph of a bound program in its device's operators, split into forward and backward, and its memory profile.

If torch's minimum cut would exceed the plan's memory limit, the values saved for the backward are those of the plan.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import torch
from torch import fx

from fxshard._torch_compat.inductor.inductor import inductor_decompositions
from fxshard.cost.liveness import HOST, BoundaryValue
from fxshard.cost.memory import Stage, profile_stages
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.layout.layouts import local_shape
from fxshard.memory_profile import MemoryProfile
from fxshard.passes.after_lowering.forward_backward import by_order, forward_collectives, forward_results
from fxshard.plans.offload import PARAMETERS
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.rank_graph import expand_draws
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.rank_graph.kernels import device_graph
from fxshard.runtime.rank_graph.partition import Partition, partition

log = logging.getLogger("fxshard")

AXIS_INDEX_BYTES = 1024
"""Bytes allowed for the rank's axis indices, of 8 bytes each, which a plan does not count."""


def rank_graph(bound: BoundProgram, compiler: str) -> fx.GraphModule:
    """The graph of a bound program in its device's operators, decomposed for ``compiler``."""
    fused = compiler == "inductor" and bound.device.type == "cuda"
    return in_device_operators(bound.program, bound.module, bound.device, compiler, fused)


def in_device_operators(
    program: ShardedProgram, module: fx.GraphModule, device: torch.device, compiler: str, fused: bool = False
) -> fx.GraphModule:
    """The graph of ``bind_graph`` in the operators of ``device``, decomposed for ``compiler``; ``fused`` as in ``device_graph``."""
    table = inductor_decompositions() if compiler == "inductor" else None
    seeds = frozenset(i for i, end in enumerate(program.inputs) if end.kind == "seed")
    module = device_graph(module, device, table, on_host=seeds | parameters_on_host(program), fused=fused)
    if compiler == "inductor":
        expand_draws.prefer_recompute_of_masks(module)
    return module


def parameters_on_host(program: ShardedProgram) -> frozenset[int]:
    """Indices of the inputs that are parameters in the memory of the host."""
    names = {program.plan.called(node) for node, kind in program.plan.on_host.items() if kind == PARAMETERS}
    return frozenset(i for i, end in enumerate(program.inputs) if end.kind == "parameter" and end.name in names)


def has_backward(program: ShardedProgram) -> bool:
    """Whether a program has a backward."""
    return program.train and any(o.kind == "gradient" for o in program.outputs)


def split_graph(bound: BoundProgram, module: fx.GraphModule) -> Partition | None:
    """Splits the graph of ``rank_graph`` into forward and backward; None without a backward."""
    program = bound.program
    if not has_backward(program):
        return None
    tangents = [i for i, end in enumerate(program.inputs) if end.kind == "tangent"]
    split = partial(partition, module, forward_results(program), tangents, forward_collectives(program), by_order(program))
    parts, limit = split(), program.plan.memory_limit
    if limit is None or (most := _peak(bound, module, parts)) <= limit:
        return parts
    planned = split(as_planned=True)
    return planned if _peak(bound, module, planned) < most else parts


def _peak(bound: BoundProgram, module: fx.GraphModule, parts: Partition | None) -> int:
    """Peak bytes, including the optimiser's state that the plan counts."""
    return profile(bound, module, parts).peak + bound.program.plan.memory.get("optimizer", 0)


Halves = tuple[fx.GraphModule, Partition | None]
"""A rank's graph, and its forward and backward, or None without a backward."""


def breaks_limit(bound: BoundProgram, before: Halves, after: Halves) -> bool:
    """Whether ``after`` exceeds the plan's memory limit and takes more than ``before``."""
    limit = bound.program.plan.memory_limit
    return limit is not None and (peak := _peak(bound, *after)) > limit and peak > _peak(bound, *before)


def check_limit(bound: BoundProgram, module: fx.GraphModule, parts: Partition | None) -> None:
    """Warns if a rank that runs the graph operator by operator exceeds the plan's memory limit."""
    limit = bound.program.plan.memory_limit
    if limit is not None and (peak := _peak(bound, module, parts)) > limit + AXIS_INDEX_BYTES:
        what = "the rank at %s takes %d bytes at its peak, %d more than memory_limit=%d; plan again with a limit that is lower by as much"
        log.warning(what, bound.coordinate, peak, peak - limit, limit)


def profile(bound: BoundProgram, module: fx.GraphModule, parts: Partition | None, optimizer: Optimizer | None = None) -> MemoryProfile:
    """The memory of a rank over a step, with the optimiser's state of each parameter that has a gradient.

    Dynamic sizes have the values at which the plan counts memory.
    """
    program = bound.program
    given, returned = _inputs(bound), _results(program)
    static = {} if optimizer is None else _optimizer_state(program, optimizer, bound.coordinate)
    if parts is None:
        return profile_stages([_stage(module.graph, given, returned)], static, program.memory_values)
    count = forward_results(program)
    tangents = [e for e, end in zip(given, program.inputs, strict=False) if end.kind == "tangent"]
    primals = [e for e, end in zip(given, program.inputs, strict=False) if end.kind != "tangent"] + given[len(program.inputs) :]
    stages = [_stage(parts.forward.graph, primals, returned[:count]), _backward_stage(parts.backward.graph, tangents, returned[count:])]
    return profile_stages(stages, static, program.memory_values)


def local_profile(bound: BoundProgram) -> MemoryProfile:
    """The memory of a rank over its local graph, before it is in the device's operators and split into forward and backward."""
    return profile_stages([_stage(bound.module.graph, _inputs(bound), _results(bound.program))], {}, bound.program.memory_values)


def _inputs(bound: BoundProgram) -> list[BoundaryValue]:
    program, kinds = bound.program, {"tangent": "input", "seed": "input"}
    pairs = zip(program.inputs, program.input_layouts, strict=True)
    away = parameters_on_host(program)
    found = [BoundaryValue(HOST if i in away else kinds.get(e.kind, e.kind), e.name, str(layout)) for i, (e, layout) in enumerate(pairs)]
    found += [BoundaryValue("input", f"axis index {axis}") for axis in bound.axes]
    sizes = [n.name for n in bound.module.graph.nodes if n.op == "placeholder"][len(found) :]  # empty if no size inputs were added
    return found + [BoundaryValue("input", name) for name in sizes]


def _results(program: ShardedProgram) -> list[BoundaryValue]:
    return [BoundaryValue(e.kind, e.name, str(layout)) for e, layout in zip(program.outputs, program.output_layouts, strict=True)]


def _stage(graph: fx.Graph, given: list[BoundaryValue], returned: list[BoundaryValue]) -> Stage:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Stage(graph, dict(zip(placeholders, given, strict=True)), _returned(graph, returned))


def _backward_stage(graph: fx.Graph, tangents: list[BoundaryValue], returned: list[BoundaryValue]) -> Stage:
    """The stage of the backward: saved values are known from the forward, the tangents are its last inputs."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Stage(graph, dict(zip(placeholders[len(placeholders) - len(tangents) :], tangents, strict=True)), _returned(graph, returned))


def _returned(graph: fx.Graph, ends: list[BoundaryValue]) -> dict[fx.Node, BoundaryValue]:
    found: dict[fx.Node, BoundaryValue] = {}
    for value, end in zip(graph.output_node().args[0], ends, strict=False):
        if isinstance(value, fx.Node):
            found.setdefault(value, end)
    return found


def _optimizer_state(program: ShardedProgram, optimizer: Optimizer, coordinate: tuple[int, ...]) -> dict[str, int]:
    """Bytes of the optimiser's state of all parameters that have gradients."""
    host = {program.plan.called(node) for node in program.plan.on_host}
    graded = {o.name for o in program.outputs if o.kind == "gradient" and o.name not in host}
    total = 0
    for i, end in enumerate(program.inputs):
        if end.kind == "parameter" and end.name in graded:
            local = local_shape(program.input_shapes[i], program.input_layouts[i], program.mesh.shape, coordinate)
            total += math.prod(local) * optimizer.bytes_per_element(getattr(torch, program.input_dtypes[i].removeprefix("torch.")))
    return {"optimizer": total}
