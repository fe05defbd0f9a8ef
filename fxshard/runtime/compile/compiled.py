"""CompiledProgram: a bound program as one callable on local tensors, differentiable if it is for training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.calls import kernels_only, locals_of, versions_of
from fxshard._torch_compat.dtensor.rules import wrap_like
from fxshard._torch_compat.dynamo.hooks import without_global_hooks
from fxshard.errors import RunError
from fxshard.layout.layouts import Layout
from fxshard.ops.host import to_host
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.compile.no_double_backward import forbid_double_backward
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.rank_graph.in_place import copy_aliased
from fxshard.runtime.rank_graph.rank_graph import parameters_on_host
from fxshard.runtime.ranks.launch import agreed, mesh_ranks
from fxshard.runtime.ranks.watchdog import BACKWARD, FORWARD, Watchdog
from fxshard.shapes import Guard, distinct

ALIGNMENT = 64
"""Bytes. If all inputs are aligned to this and share no storage, compiled code copies or views them in the same way in every call."""
BoxedFunction = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled function that takes its inputs in one list, which it may clear to free them early."""


@dataclass(frozen=True, eq=False)
class Artefact:
    """The compiled code for one size class.

    ``forward``: inputs -> ``results`` results, then the values saved for the backward; ``backward`` (None for inference): inputs at
    ``kept_inputs``, saved values, tangents -> gradients. ``tangent_of``: for each tangent, the index of its result;
    ``gradient_of``: for each input, the index of its gradient, or None; ``gradient_layouts``: the layout of that gradient if it differs
    from its input's; ``follows``: for each input, the results that its gradient depends on, None: all. ``numbers``: indices of the saved
    values that are sizes, not tensors. ``make_graphs`` returns ``graphs``, the graphs that were compiled. ``written``: inputs that the
    forward mutates.
    """

    forward: BoxedFunction
    backward: BoxedFunction | None
    results: int
    kept_inputs: tuple[int, ...]
    tangent_of: tuple[int, ...]
    gradient_of: tuple[int | None, ...]
    gradient_layouts: tuple[Layout | None, ...]
    follows: tuple[tuple[int, ...] | None, ...]
    numbers: tuple[int, ...]
    make_graphs: Callable[[], tuple[fx.GraphModule, ...]]
    written: tuple[int, ...] = ()
    guards: tuple[Guard, ...] = ()
    """The guards on dynamic sizes found during compilation, by size names: programs that share the artefact have other symbols."""

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        return self.make_graphs()


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program compiled for this rank, on first use.

    ``compiled(inputs)`` takes local tensors, or DTensors in the planned layouts, in the order of ``program.inputs``
    without tangents, and returns local tensors in the order of ``program.outputs`` without gradients. A training program
    is differentiable; the gradient of a DTensor is a DTensor in its layout.
    """

    bound: BoundProgram
    make: Callable[[], Artefact]
    watchdog: Watchdog
    known_inputs_of_backward: list[tuple[int, ...]] = field(default_factory=list)
    """The result of ``inputs_of_backward``, once it is known to be the same in every call."""

    @property
    def program(self) -> ShardedProgram:
        return self.bound.program

    @cached_property
    def artefact(self) -> Artefact:
        """The compiled code; compiles it on first use."""
        with without_autocast(self.bound.device.type), without_global_hooks():
            return self.make()

    @property
    def is_compiled(self) -> bool:
        return "artefact" in vars(self)

    def compile(self) -> None:
        """Compiles the program now if it is not compiled yet."""
        assert self.artefact

    @cached_property
    def same_guards_on_ranks(self) -> bool:
        """Whether all ranks' code has the same guards on dynamic sizes, so that each rank knows which calls the others serve.

        The first use communicates, so all ranks must make it together.
        """
        if not self.program.sizes:
            return True
        mine = "; ".join(sorted({guard.condition for guard in self.guards}))
        ranks = mesh_ranks(self.bound.device_mesh)
        return agreed(mine, "compare the guards of their programs", ranks=ranks, timeout=self.watchdog.timeout)

    def __call__(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
        """Runs the program; ``sizes``: the values of ``program.sizes``, in their units."""
        everything = [*inputs, *self.bound.axis_values]
        if not torch.is_grad_enabled():
            return self._infer(everything, sizes)
        if self.artefact.backward is not None:
            return _ProgramCall.apply(self, sizes, *everything)
        with torch.no_grad():
            return self._infer(everything, sizes)

    def _infer(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        local, written = locals_of(inputs), self.artefact.written
        if written:
            local = copy_aliased(local, written, self.may_alias)
        with kernels_only():
            out = self.watchdog.run(FORWARD, self.artefact.forward, [*local, *sizes])
        return tuple(out[: self.artefact.results])

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The guards of the program and of its compiled code on dynamic sizes."""
        return distinct((*self.program.guards, *self.artefact.guards))

    @cached_property
    def may_alias(self) -> tuple[int, ...]:
        """The inputs that may be views of one another: all but parameters, unless the program writes them."""
        return tuple(i for i, end in enumerate(self.program.inputs) if end.kind != "parameter" or i in self.artefact.written)

    @cached_property
    def on_host(self) -> frozenset[int]:
        """The inputs that are parameters on the host: so are their gradients."""
        return parameters_on_host(self.program)

    def inputs_of_backward(self, local: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Indices of the inputs that the backward reads: kept inputs, and inputs of which saved values are views."""
        if self.known_inputs_of_backward:
            return self.known_inputs_of_backward[0]
        places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(local)}
        views = {places[p] for x in kept if (p := x.untyped_storage().data_ptr()) in places}
        found = tuple(sorted({*self.artefact.kept_inputs, *views}))
        if len(places) == len(local) and all(x.data_ptr() % ALIGNMENT == 0 for x in local):
            self.known_inputs_of_backward.append(found)
        return found


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast for a device type; the graph already contains its casts."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class _ProgramCall(torch.autograd.Function):
    """A call of a training program as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledProgram, sizes: Sequence[int], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local, artefact = locals_of(inputs), compiled.artefact
        with kernels_only():
            out = compiled.watchdog.run(FORWARD, artefact.forward, [*local, *sizes])
        results, kept = tuple(out[: artefact.results]), list(out[artefact.results :])
        ctx.numbers = [(i, kept.pop(i)) for i in reversed(artefact.numbers)]
        ctx.compiled, ctx.sizes = compiled, sizes
        ctx.like = [x if isinstance(x, DTensor) else None for x in inputs]
        ctx.watched = [x for i in compiled.inputs_of_backward(local, kept) if isinstance(x := inputs[i], DTensor)]
        ctx.versions = versions_of(ctx.watched)
        ctx.save_for_backward(*[local[i] for i in artefact.kept_inputs], *kept)
        if len(artefact.tangent_of) < len(results):
            ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in artefact.tangent_of))
        ctx.set_materialize_grads(False)  # zeros are made only for results whose tangents the backward reads
        ctx.ends = [(r.shape, r.dtype, r.device) for r in results]
        return results

    @staticmethod
    @torch.compiler.disable(reason="compiled autograd need not capture a program, which is compiled already")
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, *grads)
        with torch.no_grad():
            gradients = _backward(ctx, *grads)
        return forbid_double_backward(gradients)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    compiled: CompiledProgram = ctx.compiled
    artefact = compiled.artefact
    assert artefact.backward is not None
    if versions_of(ctx.watched) != ctx.versions:  # autograd tracks versions of the local tensors only, not of the DTensors
        changed = next(x for x, count in zip(ctx.watched, ctx.versions, strict=True) if versions_of([x]) != [count])
        what = f"a DTensor of shape {tuple(changed.shape)} was changed in place between forward and backward, which needs it as it was"
        raise RunError(what, remedy="change parameters after backward, or change a clone")
    saved, tensors = list(ctx.saved_tensors), len(artefact.kept_inputs)
    saved[tensors:tensors] = ctx.sizes
    for i, number in reversed(ctx.numbers):  # sizes that the forward computed from data
        saved.insert(tensors + len(ctx.sizes) + i, number)
    ctx.maybe_clear_saved_tensors()  # unless the user retains the graph: then only the list holds them
    saved += [_tangent(grads[i], *ctx.ends[i]) for i in artefact.tangent_of]
    with kernels_only():
        out = _apart(compiled.watchdog.run(BACKWARD, artefact.backward, saved))
    for i in compiled.on_host:
        if (index := artefact.gradient_of[i]) is not None:
            out[index] = to_host(out[index])
    reached = [results is None or any(grads[k] is not None for k in results) for results in artefact.follows]
    indexes = [index if one else None for index, one in zip(artefact.gradient_of, reached, strict=True)]
    ends = zip(indexes, ctx.like, artefact.gradient_layouts, strict=True)
    return (None, None, *[_gradient(out, i, like, layout) for i, like, layout in ends])


def _apart(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``gradients`` without two in the same memory, as those of two biases that are added, or two elements, as those of a sum, which are
    expanded: autograd adds later ones to each in place, and does not look into a DTensor."""
    known: set[int] = set()
    out: list[torch.Tensor] = []
    for gradient in gradients:
        place = gradient.data_ptr() if gradient.numel() else 0
        shared = place in known or 0 in gradient.stride()
        out.append(gradient.clone() if shared else gradient)
        if place:
            known.add(place)
    return out


def _tangent(grad: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.contiguous()


def _gradient(out: Sequence[torch.Tensor], index: int | None, like: DTensor | None, layout: Layout | None) -> torch.Tensor | None:
    if index is None:
        return None
    if like is None:
        return out[index]
    if layout is None:
        return wrap_like(out[index], like)
    return DTensor.from_local(out[index], like.device_mesh, tuple(layout), run_check=False, shape=like.shape, stride=like.stride())
