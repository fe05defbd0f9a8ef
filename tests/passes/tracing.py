"""Shared by the tests of tracing: a function or module is traced, sharded by random legal plans, simulated and compared with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import Simulation, simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

ONE, TWO, SQUARE, THREE = Mesh({"a": 1}), Mesh({"a": 2}), Mesh({"a": 2, "b": 2}), Mesh({"a": 3})
SEED = 1234


class Function(nn.Module):
    """A function as a module. Its first argument is the module; ``attributes`` are set on the module."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def real(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """Normal float64 numbers, which require a gradient unless ``grad`` is False."""
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=grad)


def targets(graph: PlanningGraph) -> set[str]:
    """Names of the operators in a graph, without getitems."""
    return {str(n.target) for n in graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)}


def simulated(
    graph: PlanningGraph, mesh: Mesh, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, plan: int = 0
) -> Simulation:
    """One random legal plan of ``graph`` on all ranks of ``mesh``; draws start from SEED."""
    program = lower(graph, random_graph_plan(annotate(graph, mesh), plan))
    torch.manual_seed(SEED)
    return simulate_program(program, program_values(program, model, args, kwargs))


def check_eager(
    model: nn.Module, *args: Any, kwargs: Mapping[str, Any] | None = None, train: bool = True, rtol: float = 1e-9, plans: int = 1
) -> tuple[PlanningGraph, Simulation]:
    """Checks that outputs, gradients (of inputs too) and buffers equal eager torch's. Returns the graph and the last simulation."""
    graph = trace(model, args, kwargs, train=train)
    reference = one_device(model, args, kwargs, train)
    wanted = input_gradients(model, args, kwargs) if train else {}
    result = None
    for plan in range(plans):
        result = simulated(graph, SQUARE, model, args, kwargs, plan)
        assert_equal_to_one_device(result, reference, rtol)
        for name, grad in wanted.items():
            torch.testing.assert_close(result.grads[name], grad, rtol=rtol, atol=rtol * 1e-3)
    assert result is not None
    return graph, result


def input_gradients(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Gradients of the sum of all outputs, for the tensors among ``args`` that require one."""
    leaves = {f"args[{i}]": a for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad}
    if not leaves:
        return {}
    outputs = torch.utils._pytree.tree_leaves(model(*args, **dict(kwargs or {})))
    total = sum(o.sum() for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def check_draws(model: nn.Module, *args: Any, train: bool = True) -> Simulation:
    """Checks that results and gradients are the same on any mesh and plan. Returns the simulation on a mesh of one rank."""
    graph = trace(model, args, train=train)
    first = simulated(graph, ONE, model, args)
    for plan, mesh in enumerate((TWO, SQUARE, SQUARE, THREE)):
        other = simulated(graph, mesh, model, args, plan=plan)
        torch.testing.assert_close((other.outputs, other.grads), (first.outputs, first.grads), rtol=1e-9, atol=1e-12)
    return first
