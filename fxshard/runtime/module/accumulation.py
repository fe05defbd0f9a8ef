"""Gradient accumulation with one reduction: within ``no_sync`` gradients are DTensors whose sums over ranks are pending.

Autograd adds those up locally. The first backward outside adds its own and brings the sum to the parameter's layout, once for each
parameter. A pending gradient is an ordinary DTensor all the while: its ``full_tensor()`` is right, ``zero_grad`` drops it, an
optimiser that meets it reduces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from fxshard.errors import OptionError, a_kind
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import lower_deferred
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.compile.compiled import plain_arithmetic
from fxshard.runtime.rank_graph.bind import bind
from fxshard.runtime.ranks.launch import compare, mesh_ranks


@dataclass(eq=False)
class Accumulation:
    """When the gradients of one parallelized module are reduced. ``places``: where its parameters are, as (owner, attribute);
    ``compiler``, ``rng``, ``debug``: as the module's programs are made."""

    places: Sequence[tuple[nn.Module, str]]
    compiler: str
    rng: str
    debug: bool
    cache: bool = True
    reduces: bool = True
    runners: dict[Runner, Runner] = field(default_factory=dict)
    watched: dict[nn.Parameter, None] = field(default_factory=dict)

    def defers(self) -> bool:
        """Whether a training call runs the program that leaves sums pending: within ``no_sync``, and where a gradient is pending."""
        return not self.reduces or (bool(self.watched) and any(_pending(p.grad) for p in self.watched))

    def runner(self, whole: Runner, graph: PlanningGraph) -> Runner:
        """The runner of the same plan with pending gradients; every rank comes here."""
        if whole not in self.runners:
            bound = whole.bound
            with plain_arithmetic(bound.device.type):
                program = lower_deferred(graph, whole.program.plan, self.rng)
                compare({"program": program.hash}, ranks=mesh_ranks(bound.device_mesh), timeout=whole.timeout)
                compiled = compile_program(
                    bind(program, bound.device_mesh, bound.device), self.compiler, timeout=whole.timeout, debug=self.debug, cache=self.cache
                )
            self.runners[whole] = Runner(whole.model, compiled, list(whole.leaf_of), whole.timeout, whole.requested_outputs)
        return self.runners[whole]

    def watch(self) -> None:
        """From now on a backward outside of ``no_sync`` reduces what is pending."""
        for owner, key in self.places:
            parameter = getattr(owner, key)
            if isinstance(parameter, DTensor) and parameter.requires_grad and parameter not in self.watched:
                parameter.register_hook(partial(_meet, parameter))
                parameter.register_post_accumulate_grad_hook(self._reduce)
                self.watched[parameter] = None

    def _reduce(self, parameter: torch.Tensor) -> None:
        if self.reduces:
            _settle(parameter)


def _meet(parameter: torch.Tensor, coming: torch.Tensor) -> None:
    """A gradient that was reduced already is added to one that is: DTensor adds no shard to a pending sum in place."""
    if not _pending(coming):
        _settle(parameter)


def _settle(parameter: torch.Tensor) -> None:
    """Brings the gradient of a parameter to the parameter's layout, where it is pending."""
    grad = parameter.grad
    if _pending(grad):
        assert isinstance(grad, DTensor) and isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _pending(grad: torch.Tensor | None) -> bool:
    return isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Within it, calls of a parallelized ``model`` and their backward passes add up gradients without reducing them over ranks.

        with fxshard.no_sync(model):
            for x, y in batches[:-1]:
                model(x, y).backward()
        model(*batches[-1]).backward()      # reduces the sum of all, once
        optimizer.step(); optimizer.zero_grad()

    A pending gradient takes the memory of one that is not reduced: that of the whole parameter where the batch is cut. All ranks
    enter and leave alike. ``model`` may hold parallelized modules. Raises OptionError where it holds none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = [a for m in modules if isinstance(a := getattr(vars(m).get("forward"), "accumulation", None), Accumulation)]
    if not found:
        what = f"no_sync was given {a_kind(model)}" + (" with no parallelized module in it" if isinstance(model, nn.Module) else "")
        raise OptionError(what, remedy="give it what fxshard.parallelize returned; the torch.compile backend reduces in each backward")
    before = [a.reduces for a in found]
    for accumulation in found:
        accumulation.watch()
        accumulation.reduces = False
    try:
        yield
    finally:
        for accumulation, reduces in zip(found, before, strict=True):
            accumulation.reduces = reduces
