"""CompiledProgram: what was compiled of a bound program, as one call on local tensors; differentiable when for training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import wrap_like
from fxshard._torch_compat.calls import kernels_only, locals_of, versions_of
from fxshard._torch_compat.dynamo.hooks import without_global_hooks
from fxshard.errors import RunError
from fxshard.layout.layouts import Layout
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.compile.no_double_backward import only_once
from fxshard.runtime.rank_graph.bind import BoundProgram
from fxshard.runtime.rank_graph.in_place import apart
from fxshard.runtime.ranks.launch import agreed, mesh_ranks
from fxshard.runtime.ranks.watchdog import BACKWARD, FORWARD, Watchdog
from fxshard.shapes import Guard, distinct

ALIGNED = 64
"""Bytes: where all inputs start at a multiple, two of which share no memory, compiled code does not copy some calls' and view others'."""
Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes its inputs in one list, which it may empty."""


@dataclass(frozen=True, eq=False)
class Artefact:
    """What was compiled for one size class.

    ``forward``: inputs -> ``results`` results, then what is kept; ``backward`` (None for inference): inputs at
    ``kept_inputs``, kept values, tangents -> gradients. ``tangent_of``: for each tangent the result that it belongs to;
    ``gradient_of``: for each input the gradient that is its own, or None; ``gradient_layouts``: how that one lies where it does not lie
    as its input. ``numbers``: places among the kept values of those that are sizes, no tensors. ``graphs`` are the graphs that were
    compiled, which ``make_graphs`` gives. ``written``: inputs that the forward writes into.
    """

    forward: Run
    backward: Run | None
    results: int
    kept_inputs: tuple[int, ...]
    tangent_of: tuple[int, ...]
    gradient_of: tuple[int | None, ...]
    gradient_layouts: tuple[Layout | None, ...]
    numbers: tuple[int, ...]
    make_graphs: Callable[[], tuple[fx.GraphModule, ...]]
    written: tuple[int, ...] = ()
    guards: tuple[Guard, ...] = ()
    """What was taken for granted of dynamic sizes while it was compiled: other programs that share it have symbols of their own."""

    @cached_property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        return self.make_graphs()


@dataclass(frozen=True, eq=False)
class CompiledProgram:
    """A program that runs on this rank.

    ``compiled(inputs)`` takes local tensors, or DTensors in the planned layouts, in the order of ``program.inputs``
    without tangents, and returns local tensors in the order of ``program.outputs`` without gradients. A training program
    is differentiable; the gradient of a DTensor is a DTensor in its layout.
    """

    bound: BoundProgram
    make: Callable[[], Artefact]
    watchdog: Watchdog
    read_in_all: list[tuple[int, ...]] = field(default_factory=list)
    """The places that ``read_later`` found, once it is known that they are the same in every call."""

    @property
    def program(self) -> ShardedProgram:
        return self.bound.program

    @cached_property
    def artefact(self) -> Artefact:
        """What was compiled, once it is asked for."""
        with plain_arithmetic(self.bound.device.type), without_global_hooks():
            return self.make()

    @property
    def is_compiled(self) -> bool:
        return "artefact" in vars(self)

    def compile(self) -> None:
        """Compiles it now, unless it is."""
        assert self.artefact

    @cached_property
    def ranks_alike(self) -> bool:
        """Whether all ranks' programs take the same for granted of dynamic sizes, so that each knows by itself what the others serve.
        Every rank asks this first at the same time."""
        if not self.program.sizes:
            return True
        mine = "; ".join(sorted({guard.condition for guard in self.guards}))
        ranks = mesh_ranks(self.bound.device_mesh)
        return agreed(mine, "compare what their programs take for granted", ranks=ranks, timeout=self.watchdog.timeout)

    def __call__(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
        """``sizes``: those of ``program.sizes``, counted in their units."""
        everything = [*inputs, *self.bound.axis_values]
        if not torch.is_grad_enabled():
            return self._infer(everything, sizes)
        if self.artefact.backward is not None:
            return _Step.apply(self, sizes, *everything)
        with torch.no_grad():
            return self._infer(everything, sizes)

    def _infer(self, inputs: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        local, written = locals_of(inputs), self.artefact.written
        if written:
            local = apart(local, written, self.may_share)
        with kernels_only():
            out = self.watchdog.run(FORWARD, self.artefact.forward, [*local, *sizes])
        return tuple(out[: self.artefact.results])

    @property
    def guards(self) -> tuple[Guard, ...]:
        """What the program and its compiler take for granted of its sizes."""
        return distinct((*self.program.guards, *self.artefact.guards))

    @cached_property
    def may_share(self) -> tuple[int, ...]:
        """Inputs of which one may be a view of another: those that are no parameters."""
        return tuple(i for i, end in enumerate(self.program.inputs) if end.kind != "parameter")

    def read_later(self, local: Sequence[torch.Tensor], kept: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Places of the inputs that the backward reads: those that are kept, and those that kept values are views of."""
        if self.read_in_all:
            return self.read_in_all[0]
        places = {x.untyped_storage().data_ptr(): i for i, x in enumerate(local)}
        views = {places[p] for x in kept if (p := x.untyped_storage().data_ptr()) in places}
        found = tuple(sorted({*self.artefact.kept_inputs, *views}))
        if len(places) == len(local) and all(x.data_ptr() % ALIGNED == 0 for x in local):
            self.read_in_all.append(found)
        return found


def plain_arithmetic(device: str) -> contextlib.AbstractContextManager[Any]:
    """Without autocast for a kind of device: its casts are in the graph already."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class _Step(torch.autograd.Function):
    """One call of a training program as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledProgram, sizes: Sequence[int], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local, artefact = locals_of(inputs), compiled.artefact
        with kernels_only():
            out = compiled.watchdog.run(FORWARD, artefact.forward, [*local, *sizes])
        results, kept = tuple(out[: artefact.results]), list(out[artefact.results :])
        ctx.numbers = [(i, kept.pop(i)) for i in reversed(artefact.numbers)]
        ctx.compiled, ctx.sizes = compiled, sizes
        ctx.like = [x if isinstance(x, DTensor) else None for x in inputs]
        ctx.watched = [x for i in compiled.read_later(local, kept) if isinstance(x := inputs[i], DTensor)]
        ctx.versions = versions_of(ctx.watched)
        ctx.save_for_backward(*[local[i] for i in artefact.kept_inputs], *kept)
        if len(artefact.tangent_of) < len(results):
            ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in artefact.tangent_of))
        ctx.set_materialize_grads(False)  # zeros are made for results that the backward asks for, and only for those
        ctx.ends = [(r.shape, r.dtype, r.device) for r in results]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, *grads)
        with torch.no_grad():
            gradients = _backward(ctx, *grads)
        return only_once(gradients)


def _backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
    compiled: CompiledProgram = ctx.compiled
    artefact = compiled.artefact
    assert artefact.backward is not None
    if versions_of(ctx.watched) != ctx.versions:  # autograd watches the local tensors, which a DTensor's own changes do not count for
        changed = next(x for x, count in zip(ctx.watched, ctx.versions, strict=True) if versions_of([x]) != [count])
        what = f"a DTensor of shape {tuple(changed.shape)} was changed in place between forward and backward, which needs it as it was"
        raise RunError(what, remedy="change parameters after backward, or change a clone")
    saved, tensors = list(ctx.saved_tensors), len(artefact.kept_inputs)
    saved[tensors:tensors] = ctx.sizes
    for i, number in reversed(ctx.numbers):  # sizes that only the forward could tell
        saved.insert(tensors + len(ctx.sizes) + i, number)
    ctx.maybe_clear_saved_tensors()  # unless the user retains the graph: the list is then all that holds them
    saved += [_tangent(grads[i], *ctx.ends[i]) for i in artefact.tangent_of]
    with kernels_only():
        out = compiled.watchdog.run(BACKWARD, artefact.backward, saved)
    ends = zip(artefact.gradient_of, ctx.like, artefact.gradient_layouts, strict=True)
    return (None, None, *[_gradient(out, i, like, layout) for i, like, layout in ends])


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
