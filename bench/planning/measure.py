"""The measurements, each of which runs in its own process: traces by torch alone, and fxshard's passes."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bench.planning.models import MODELS
from fxshard._torch_compat import capture_dynamo_graph, pytree
from fxshard._torch_compat.aot import aot_export_joint_with_descriptors
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.cli.arguments.words import parse_words
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.pipeline import LOWERING, PLANNING, Compilation, Request, run
from fxshard.passes.runner import Pass
from fxshard.passes.trace.trace import fake_copy, fake_tensor
from fxshard.plans.parallel import read_parallel
from fxshard.shapes import dynamic_dims


@dataclass(frozen=True)
class Stage:
    """One stage: ``wall`` and ``cpu``: seconds; ``made``: its result in words; ``memory``: the peak of the process so far, in bytes."""

    name: str
    wall: float
    cpu: float
    made: str
    memory: int


@dataclass(frozen=True)
class Measured:
    """``gap``: that of the plan; None for a trace by torch alone."""

    stages: tuple[Stage, ...]
    gap: float | None = None
    hash: str = ""


def ours(
    model: str,
    layers: int,
    mesh: str,
    hardware: str,
    time_limit: float | None,
    lower: bool = False,
    shapes: Any = None,
    words: str | None = None,
) -> Measured:
    """fxshard's passes from the model to a verified plan; with ``lower`` also to a program. ``shapes``: the dynamic dims; ``words``: those
    of the axes, as on the command line."""
    _quiet()
    module, args, kwargs = MODELS[model](layers)
    dims = dynamic_dims(module, args, kwargs, shapes)
    on = parse_mesh(mesh, hardware)
    parallel = read_parallel(parse_words(words), on)
    state = Compilation(on, Request(module, args, kwargs, time_limit=time_limit, dynamic=dims, parallel=parallel))
    stages: list[Stage] = []
    state = _run(PLANNING, state, stages)
    assert state.plan is not None
    if lower:
        _run(LOWERING, Compilation(state.mesh, graph=state.graph, plan=state.plan), stages)
    return Measured(tuple(stages), state.plan.gap, state.plan.hash)


def _run(passes: Sequence[Pass], state: Compilation, stages: list[Stage]) -> Compilation:
    for one in passes:
        with _timed(one.name, stages) as made:
            state = run((one,), state, dump=False)
            made.append(state.records[-1].made)
    return state


def bare(kind: str, model: str, layers: int) -> Measured:
    """A joint graph of forward and backward, made by torch's own tools alone from the same model on the same fake tensors."""
    _quiet()
    module, args, kwargs = MODELS[model](layers)
    stages: list[Stage] = []
    with _timed("fakes", stages) as made:
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        fake = fake_copy(module, mode)
        given, named = pytree.tree_map(lambda a: fake_tensor(a, mode), (args, kwargs))
        made.append("fake tensors")
    with _timed(kind, stages) as made, mode:
        try:
            made.append(f"graph of {len(BARE[kind](fake, given, named).graph.nodes)} nodes")
        except Exception as error:
            made.append(f"no graph: {type(error).__name__}")
    return Measured(tuple(stages))


def _captured(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    graph = capture_dynamo_graph(module)(*args, **kwargs)
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.recompile()
    return _joint(graph, tuple(a for a in pytree.tree_leaves((args, kwargs))), {})


def _joint(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, args, kwargs).graph_module


def _by_make_fx(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    def step(parameters: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loss = torch.func.functional_call(module, parameters, args, kwargs)
        return loss, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

    return make_fx(step)(dict(module.named_parameters()), args, kwargs)


BARE: dict[str, Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], fx.GraphModule]] = {
    "dynamo and joint export": _captured,
    "joint export": _joint,
    "make_fx": _by_make_fx,
}
"""Dynamo and AOTAutograd, as in ``torch.compile``, in sharders built on it and in fxshard; AOTAutograd without Dynamo, which ignores side
effects and graph breaks; neither, which leaves in-place writes in the graph."""


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@contextlib.contextmanager
def _timed(name: str, stages: list[Stage]) -> Iterator[list[str]]:
    made: list[str] = []
    wall, cpu = time.perf_counter(), time.process_time()
    yield made
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    stages.append(Stage(name, wall, cpu, "".join(made), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
