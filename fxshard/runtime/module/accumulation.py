"""Gradient accumulation with one reduction: within ``no_sync`` gradients are DTensors whose sums over ranks are pending.

Autograd adds those up locally. The first backward outside adds its own gradient and redistributes the sum to the parameter's layout,
once for each parameter. A pending gradient is an ordinary DTensor: ``full_tensor()`` gives the reduced value, ``zero_grad`` drops it, and
an optimiser that reads it reduces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxshard.errors import OptionError, a_kind
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import lower_deferred
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.calls.waiting import WaitingForward
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.compile.compiled import without_autocast
from fxshard.runtime.rank_graph.bind import bind
from fxshard.runtime.ranks.launch import compare, mesh_ranks


@dataclass(eq=False)
class Accumulation:
    """Decides when the gradients of one parallelized module are reduced. ``places``: its parameters as (owner, attribute);
    ``compiler``, ``rng``, ``debug``, ``cache``: as for the module's other programs; ``reduces``: False within ``no_sync``."""

    places: Sequence[tuple[nn.Module, str]]
    compiler: str
    rng: str
    debug: bool
    cache: bool = True
    reduces: bool = True
    runners: dict[Runner, Runner] = field(default_factory=dict)
    hooked: dict[nn.Parameter, None] = field(default_factory=dict)

    def defers(self) -> bool:
        """Whether a training call runs the program that leaves gradients pending: within ``no_sync``, or while a gradient is pending."""
        return not self.reduces or (bool(self.hooked) and any(_is_pending(p.grad) for p in self.hooked))

    def runner(self, reducing: Runner, graph: PlanningGraph) -> Runner:
        """The runner of the same plan with pending gradients; every rank calls this."""
        if reducing not in self.runners:
            bound = reducing.bound
            with without_autocast(bound.device.type):
                program = lower_deferred(graph, reducing.program.plan, self.rng)
                compare({"program": program.hash}, ranks=mesh_ranks(bound.device_mesh), timeout=reducing.timeout)
                compiled = compile_program(
                    bind(program, bound.device_mesh, bound.device),
                    self.compiler,
                    timeout=reducing.timeout,
                    debug=self.debug,
                    cache=self.cache,
                )
            self.runners[reducing] = replace(reducing, compiled=compiled)
        return self.runners[reducing]

    def register_hooks(self) -> None:
        """Registers hooks on the parameters: a backward outside of ``no_sync`` reduces pending gradients."""
        for owner, key in self.places:
            parameter = getattr(owner, key)
            if isinstance(parameter, DTensor) and parameter.requires_grad and parameter not in self.hooked:
                parameter.register_hook(partial(_reduce_before_adding, parameter))
                parameter.register_post_accumulate_grad_hook(self._reduce)
                self.hooked[parameter] = None

    def _reduce(self, parameter: torch.Tensor) -> None:
        if self.reduces:
            _reduce_pending(parameter)


def _reduce_before_adding(parameter: torch.Tensor, new: torch.Tensor) -> None:
    """Reduces the pending gradient before a reduced one is added: DTensor cannot add a shard to a pending sum in place."""
    if not _is_pending(new):
        _reduce_pending(parameter)


def _reduce_pending(parameter: torch.Tensor) -> None:
    """Redistributes a pending gradient to the parameter's layout."""
    grad = parameter.grad
    if _is_pending(grad):
        assert isinstance(grad, DTensor) and isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _is_pending(grad: torch.Tensor | None) -> bool:
    return isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A context in which backward passes of a parallelized ``model`` add up gradients without reducing them over ranks.

        with fxshard.no_sync(model):
            for x, y in batches[:-1]:
                model(x, y).backward()
        model(*batches[-1]).backward()      # reduces the sum of all, once
        optimizer.step(); optimizer.zero_grad()

    A pending gradient takes the memory of an unreduced one: that of the full parameter if the batch is sharded. All ranks enter and
    leave together. ``model`` may contain parallelized modules. Raises OptionError if it contains none.
    """
    before = {module: decides.reduces for module, decides in _deciding(model)}
    if not before:
        what = f"no_sync was given {a_kind(model)}" + (" with no parallelized module in it" if isinstance(model, nn.Module) else "")
        raise OptionError(what, remedy="give it what fxshard.parallelize returned; the torch.compile backend reduces in each backward")
    leave_pending(model)
    try:
        yield
    finally:
        for module, decides in _deciding(model):  # a first call may have made some in the block
            decides.reduces = before.get(module, all(before.values()))


def leave_pending(model: nn.Module) -> None:
    """From now on the backward passes of the parallelized modules in ``model`` leave gradients pending."""
    for _, decides in _deciding(model):
        decides.reduces = False
        if isinstance(decides, Accumulation):
            decides.register_hooks()


def _deciding(model: nn.Module) -> Iterator[tuple[nn.Module, Accumulation | WaitingForward]]:
    """The parallelized modules in ``model``, each with what decides when its gradients are reduced."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        forward = vars(module).get("forward")
        found = forward if isinstance(forward, WaitingForward) else getattr(forward, "accumulation", None)
        if isinstance(found, Accumulation | WaitingForward):
            yield module, found
