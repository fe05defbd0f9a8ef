"""Trains a model with a plan for a few SGD steps, simulated in one process or on real ranks, and compares with one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.ranks.record import in_order_of_issue, record_collectives
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.random_plan import random_graph_plan
from tests.models import zoo

STEPS, RATE = 3, 0.05


@dataclass(frozen=True)
class Case:
    """A model of the zoo on a mesh: with the plan that ``request`` gives, or a random one from ``seed``."""

    model: str
    mesh: str
    request: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    frugal: bool = False
    dtype: torch.dtype = torch.float64
    compiler: str = "eager"

    @property
    def rtol(self) -> float:
        return 1e-9 if self.dtype == torch.float64 else 1e-5


@dataclass(frozen=True)
class Trained:
    """The loss of each step and the parameters after the last one."""

    losses: list[float]
    parameters: dict[str, Tensor]


Run = Callable[[Case, nn.Module, Any, Any], Trained]


def check(case: Case, run: Run) -> None:
    """Checks that ``run`` trains as one device does.

    Some parameters start at zero and have gradients that are zero in exact arithmetic, such as the bias of keys in attention. What
    rounding leaves in them may be as large as five roundings of the whole update.
    """
    model, args, kwargs = zoo.make(case.model, case.dtype)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    want = one_device(case, copy.deepcopy(model), args, kwargs)
    moved = torch.stack([(p - start[n]).norm() for n, p in want.parameters.items()]).norm()
    noise = 5 * torch.finfo(case.dtype).eps * float(moved)
    have = run(case, model, args, kwargs)
    for loss, reference in zip(have.losses, want.losses, strict=True):
        assert abs(loss - reference) <= case.rtol * abs(reference), f"losses {have.losses}, not {want.losses}"
    for name, parameter in want.parameters.items():
        error, size = float((have.parameters[name] - parameter).norm()), float(parameter.norm())
        assert error <= max(case.rtol * size, noise), f"{name} is off by {error:.3g}, its norm is {size:.3g}"


def objective(outputs: list[Tensor]) -> Tensor:
    """The loss among a model's outputs, or the sum of its only one."""
    (loss,) = [o for o in outputs if o.ndim == 0] or [o.sum() for o in outputs]
    return loss


def one_device(case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    return _train(case, model, lambda: model(*args, **kwargs))


@functools.cache
def traced(model: str, dtype: torch.dtype) -> PlanningGraph:
    return trace(*zoo.make(model, dtype))


def plan_of(case: Case) -> ShardingPlan:
    graph, mesh = traced(case.model, case.dtype), parse_mesh(case.mesh, "h100")
    if case.seed is not None:
        return random_graph_plan(annotate(graph, mesh), case.seed, whole_outputs=True, frugal=case.frugal)
    return plan_graph(graph, mesh, Request(output_layouts="R" * mesh.ndim, **case.request))


def simulated(case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    """Trains with all ranks in this process; the tangents are the gradients of ``objective``."""
    program = lower_plan(traced(case.model, case.dtype), plan_of(case))
    with torch.no_grad():
        outputs = tree_leaves(copy.deepcopy(model)(*args, **kwargs))
    tangents = [torch.full_like(o, len(outputs) == 1 or o.ndim == 0) for o in outputs]
    losses = []
    for _ in range(STEPS):
        result = simulate_program(program, program_values(program, model, args, kwargs, tangents))
        losses.append(float(objective(tree_leaves(result.outputs))))
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(result.mutations.get(name, buffer))
            for name, parameter in model.named_parameters():
                parameter -= RATE * result.grads.get(name, torch.zeros(()))
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()})


def on_ranks(plan_json: str, case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    """Trains with a plan as one of the ranks, and checks that it issues the program's collectives one for one."""
    mesh, plan = parse_mesh(case.mesh), ShardingPlan.from_json(plan_json)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
    parallelize(model, args, device_mesh, plan, example_kwargs=kwargs, compiler=case.compiler)
    with record_collectives() as issued:
        trained = _train(case, model, lambda: model(*args, **kwargs))
    (program,) = model.forward.programs
    predicted = [(c.kind, c.axis, c.shape, c.dtype) for c in in_order_of_issue(program, dict.fromkeys(program.mesh.axis_names, "gloo"))]
    ran = [(c.kind, c.axis, c.shape, c.dtype) for c in issued]
    differing = [pair for pair in zip(ran, predicted * STEPS, strict=False) if pair[0] != pair[1]]
    assert ran == predicted * STEPS, f"{len(ran)} ran, {STEPS} x {len(predicted)} predicted: {differing[:3]}"
    served = [pair for c in program.collectives for pair in c.serves]
    assert len({*served}) == len(served) == len(plan.collectives)
    return Trained(trained.losses, {n: p.full_tensor() for n, p in trained.parameters.items() if isinstance(p, DTensor)})


def _train(case: Case, model: nn.Module, call: Callable[[], Any]) -> Trained:
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for _ in range(STEPS):
        loss = objective(tree_leaves(call()))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()})
