"""compile: a bound program -> callables on local tensors, by Inductor or as eager aten; differentiable when for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import inductor_compile, inductor_decompositions, inductor_output_strides, wrap_like
from fxshard.errors import OptionError
from fxshard.program import ShardedProgram
from fxshard.runtime.bind import BoundProgram
from fxshard.runtime.kernels import device_graph
from fxshard.runtime.partition import forward_collectives, forward_results, partition

BACKENDS = ("inductor", "eager")
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes its inputs in one list, which it may empty."""


@dataclass(frozen=True, eq=False)
class Artefact:
    """What was compiled for one size class.

    ``forward``: inputs -> ``results`` results, then what is kept; ``backward`` (None for inference): inputs at
    ``kept_inputs``, kept values, tangents -> gradients. ``tangent_of``: for each tangent the result that it belongs to;
    ``gradient_of``: for each input the gradient that is its own, or None. ``graphs`` are the graphs that were compiled.
    """

    forward: Run
    backward: Run | None
    results: int
    kept_inputs: tuple[int, ...]
    tangent_of: tuple[int, ...]
    gradient_of: tuple[int | None, ...]
    graphs: tuple[fx.GraphModule, ...]


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program that runs on this rank.

    ``compiled(inputs)`` takes local tensors, or DTensors in the planned layouts, in the order of ``program.inputs``
    without tangents, and returns local tensors in the order of ``program.outputs`` without gradients. A training program
    is differentiable; the gradient of a DTensor is a DTensor in its layout.
    """

    bound: BoundProgram
    artefact: Artefact

    @property
    def program(self) -> ShardedProgram:
        return self.bound.program

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        kind = self.bound.device.type
        if torch.is_autocast_enabled(kind):  # its casts are in the graph already
            with torch.autocast(kind, enabled=False):
                return self(inputs)
        everything = [*inputs, *self.bound.axis_values]
        if self.artefact.backward is not None and torch.is_grad_enabled():
            return _Step.apply(self.artefact, *everything)
        with torch.no_grad():
            return tuple(self.artefact.forward([local_of(x) for x in everything])[: self.artefact.results])


_ARTEFACTS: WeakValueDictionary[Any, Artefact] = WeakValueDictionary()


def compile_program(bound: BoundProgram, backend: str = "inductor") -> CompiledProgram:
    """Compiles ``bound``; programs and ranks whose local graphs are the same share one artefact in a process.

    Raises OptionError for an unknown ``backend``.
    """
    if backend not in BACKENDS:
        raise OptionError(f"unknown backend {backend!r}", remedy=f"use one of {', '.join(BACKENDS)}")
    key = (bound.program.hash, bound.size_class, bound.groups, str(bound.device), backend)
    artefact = _ARTEFACTS.get(key)
    if artefact is None:
        artefact = _ARTEFACTS[key] = _compile(bound, backend)
    return CompiledProgram(bound, artefact)


def _compile(bound: BoundProgram, backend: str) -> Artefact:
    program = bound.program
    table = inductor_decompositions() if backend == "inductor" else None
    seeds = frozenset(i for i, end in enumerate(program.inputs) if end.kind == "seed")
    module = device_graph(bound.module, bound.device, table, on_host=seeds)
    results = forward_results(program)
    tangents = [i for i, end in enumerate(program.inputs) if end.kind == "tangent"]
    if not program.train or not any(o.kind == "gradient" for o in program.outputs):
        return Artefact(_run(module, backend, results, is_inference=True), None, results, (), (), (), (module,))
    parts = partition(module, results, tangents, forward_collectives(program))
    forward = _run(parts.forward, backend, results)
    if backend == "inductor":
        _follow_strides(parts.backward, inductor_output_strides(forward), results, len(parts.kept_inputs), parts.kept)
    count = sum(o.kind == "gradient" for o in program.outputs)
    backward = _run(parts.backward, backend, count, is_backward=True)
    ends = _tangent_of(program), _gradient_of(program, len(bound.axes))
    return Artefact(forward, backward, results, parts.kept_inputs, *ends, (parts.forward, parts.backward))


def _run(module: fx.GraphModule, backend: str, visible: int, **kind: bool) -> Run:
    """``module`` as one callable; its first ``visible`` results keep the strides they have in the graph."""
    if backend == "eager":
        return lambda inputs: module(*inputs)
    copy = fx.GraphModule(torch.nn.Module(), _copied(module.graph))
    output = copy.graph.output_node()
    output.meta["user_visible_output_idxs"] = [i for i in range(visible) if isinstance(output.args[0][i], fx.Node)]
    inputs = [n.meta["val"] for n in copy.graph.nodes if n.op == "placeholder"]
    return inductor_compile(copy, inputs, **kind)


def _copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def _follow_strides(backward: fx.GraphModule, strides: list[tuple[int, ...] | None] | None, results: int, start: int, kept: int) -> None:
    """Kept values arrive with the strides that the compiled forward gives them."""
    if strides is None:
        return
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"][start : start + kept]
    for node, stride in zip(placeholders, strides[results:], strict=True):
        value = node.meta["val"]
        if stride is not None and value.stride() != stride:
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)


def _tangent_of(program: ShardedProgram) -> tuple[int, ...]:
    positions = {o.name: i for i, o in enumerate(program.outputs) if o.kind == "output"}
    return tuple(positions[end.name.replace("tangents", "outputs")] for end in program.inputs if end.kind == "tangent")


def _gradient_of(program: ShardedProgram, axes: int) -> tuple[int | None, ...]:
    """For each input of the forward (no tangents, the axes' values at the end) the index of its gradient."""
    names = [o.name for o in program.outputs if o.kind == "gradient"]
    positions = {name: i for i, name in enumerate(names)}
    primals = [end for end in program.inputs if end.kind != "tangent"]
    found = [positions.get(end.name) if end.kind in ("parameter", "input") else None for end in primals]
    return (*found, *[None] * axes)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The dense local tensor of a DTensor, or of a tensor that is local already; outside of autograd."""
    return (value.to_local() if isinstance(value, DTensor) else value).contiguous()


class _Step(torch.autograd.Function):
    """One call of a training program as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, artefact: Artefact, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local = [local_of(x) for x in inputs]
        out = artefact.forward(list(local))
        results, kept = tuple(out[: artefact.results]), out[artefact.results :]
        ctx.artefact = artefact
        ctx.like = [x if isinstance(x, DTensor) else None for x in inputs]
        ctx.save_for_backward(*[local[i] for i in artefact.kept_inputs], *kept)
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in artefact.tangent_of))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        artefact: Artefact = ctx.artefact
        assert artefact.backward is not None
        tangents = [grads[i].contiguous() for i in artefact.tangent_of]
        out = artefact.backward([*ctx.saved_tensors, *tangents])
        return (None, *(_gradient(out, i, like) for i, like in zip(artefact.gradient_of, ctx.like, strict=True)))


def _gradient(out: Sequence[torch.Tensor], index: int | None, like: DTensor | None) -> torch.Tensor | None:
    if index is None:
        return None
    return out[index] if like is None else wrap_like(out[index], like)
