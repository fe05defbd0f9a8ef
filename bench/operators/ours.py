"""fxshard's side: trace, annotate, draw a random legal plan with the inputs in the combination's placements, lower, simulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from bench.operators.entries import Sample
from bench.operators.truth import Truth, difference, flat, scale_of
from bench.operators.verdict import Finding
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.annotation.verify import verify_graph, verify_plan
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.program.verify_program import verify_program
from fxshard.runtime.simulate.simulate import Simulation, simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.strategies import op_strategy
from fxshard.testing.random_plan import random_graph_plan
from fxshard.views.fallbacks import NO_RULE


class Wrapped(nn.Module):
    """An operator as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Ours:
    """One sample on fxshard, traced once for all combinations."""

    def __init__(self, sample: Sample, truth: Truth, grad: bool) -> None:
        self.sample, self.truth, self.grad = sample, truth, grad
        args, kwargs = sample.fresh(grad)
        self.graph: PlanningGraph = trace(Wrapped(sample.function), args, kwargs, train=grad)
        verify_graph(self.graph)
        self.annotated: Annotated = annotate(self.graph, Mesh({"x": sample.world}))
        self.inputs = _tensor_names(self.graph, args, kwargs)
        self.replicated: Simulation | None = None

    def fallbacks(self) -> list[str]:
        """The graph's operators without a rule."""
        return sorted({str(self.graph.by_name[name].target) for name, why in self.annotated.fallbacks if why.startswith(NO_RULE)})

    def notes(self) -> list[str]:
        """The reasons that rules give for not offering more."""
        calls = self.annotated.calls.values()
        return sorted({f"{c.op}: {s.reason}" for c in calls for s in [op_strategy(c, self.annotated.mesh)] if s.reason and not s.fallback})

    def run(self, placements: tuple[int | None, ...], seed: int) -> Finding:
        """Runs one combination, and compares its results with the truth."""
        layouts = {
            name: Layout([Replicate() if dim is None else Shard(dim)]) for name, dim in zip(self.inputs, placements, strict=True) if name
        }
        result = self._simulate({n: x for n, x in layouts.items() if n in {i.name for i in self.graph.inputs}}, seed)
        if self.truth.random and self.replicated is None:
            self.replicated = self._simulate({i.name: Layout([Replicate()]) for i in self.graph.inputs}, None)
        said = self._outputs(result) or (self._grads(result) if self.grad else None)
        return Finding("wrong" if said else "right", said or "")

    def _simulate(self, layouts: dict[str, Layout], seed: int | None) -> Simulation:
        plan = random_graph_plan(self.annotated, seed, inputs=layouts)
        verify_plan(self.annotated, plan)
        program = lower(self.graph, plan)
        verify_program(program)
        args, kwargs = self.sample.fresh(False)
        torch.manual_seed(self.sample.seed)
        tangents = [t for t in self.truth.tangents] if self.grad else None
        return simulate_program(program, program_values(program, None, args, kwargs, tangents))

    def _outputs(self, result: Simulation) -> str | None:
        have = flat(result.outputs)
        if self.truth.random:
            said = difference(have, self.truth.outputs, numbers=False)
            return said or (difference(have, flat(self.replicated.outputs)) if self.replicated else None)
        return difference(have, self.truth.outputs)

    def _grads(self, result: Simulation) -> str | None:
        """A difference in the gradients, or None. A missing gradient equals one of zeros."""
        want = self.truth.grads if self.replicated is None else [self.replicated.grads.get(n) for n in self.inputs]
        for name, grad in zip(self.inputs, want, strict=True):
            have = result.grads.get(name)
            if have is None or grad is None:
                one = grad if have is None else have
                said = None if one is None or not one.count_nonzero() else f"is {'missing' if have is None else 'not zero'}"
            else:
                said = difference([have], [grad], scale=scale_of(want))
            if said:
                return f"gradient of {name} {said}"
        return None


def _tensor_names(graph: PlanningGraph, args: Any, kwargs: Any) -> list[str]:
    """The path of each tensor argument, in the order of ``Sample.tensors``."""
    from fxshard.runtime.simulate.values import argument_values

    return list(argument_values(args, kwargs))
