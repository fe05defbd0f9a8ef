"""One body, two runners: a few SGD steps of a model under a plan, simulated in one process or on real ranks, against one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fxshard.mesh import parse_mesh
from fxshard.passes.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace import trace
from fxshard.runtime.module import parallelize
from fxshard.runtime.record import in_order_of_issue, record_collectives
from fxshard.runtime.simulate import simulate_program
from fxshard.runtime.values import program_values
from fxshard.sharding_plan import ShardingPlan
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
    dtype: torch.dtype = torch.float64
    backend: str = "eager"
    rate: float = RATE

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
    """``run`` trains as one device does."""
    model, args, kwargs = zoo.make(case.model, case.dtype)
    want = one_device(case, copy.deepcopy(model), args, kwargs)
    have = run(case, model, args, kwargs)
    for loss, reference in zip(have.losses, want.losses, strict=True):
        assert abs(loss - reference) <= case.rtol * abs(reference), f"losses {have.losses}, not {want.losses}"
    for name, parameter in want.parameters.items():
        error, size = float((have.parameters[name] - parameter).norm()), float(parameter.norm())
        assert error <= case.rtol * max(size, 1e-3), f"{name} is off by {error:.3g}, its norm is {size:.3g}"


def one_device(case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    return _train(case, model, lambda: model(*args, **kwargs))


def plan_of(case: Case, model: nn.Module, args: Any, kwargs: Any) -> ShardingPlan:
    mesh, graph = parse_mesh(case.mesh, "h100"), trace(model, args, kwargs)
    if case.seed is not None:
        return random_graph_plan(annotate(graph, mesh), case.seed, whole_outputs=True)
    return plan_graph(graph, mesh, Request(output_layouts="R" * mesh.ndim, **case.request))


def simulated(case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    """All ranks in this process; tangents are ones, so the loss is the sum of the differentiable outputs."""
    program = lower_plan(trace(model, args, kwargs), plan_of(case, model, args, kwargs))
    differentiable = {end.name.replace("tangents", "outputs") for end in program.inputs if end.kind == "tangent"}
    kept = [o.name in differentiable for o in program.outputs if o.kind == "output"]
    losses = []
    for _ in range(STEPS):
        result = simulate_program(program, program_values(program, model, args, kwargs))
        leaves = torch.utils._pytree.tree_leaves(result.outputs)
        losses.append(sum(float(o.sum()) for o, mine in zip(leaves, kept, strict=True) if mine))
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(result.mutations.get(name, buffer))
            for name, parameter in model.named_parameters():
                parameter -= case.rate * result.grads.get(name, torch.zeros(()))
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()})


def on_ranks(case: Case, model: nn.Module, args: Any, kwargs: Any) -> Trained:
    """This process is one of the ranks; what it issues is what the program says, one for one."""
    plan, mesh = plan_of(case, model, args, kwargs), parse_mesh(case.mesh)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
    parallelize(model, args, device_mesh, plan, example_kwargs=kwargs, backend=case.backend)
    with record_collectives() as issued:
        trained = _train(case, model, lambda: model(*args, **kwargs))
    (program,) = model.forward.programs
    predicted = [(c.kind, c.axis, c.shape, c.dtype) for c in in_order_of_issue(program)]
    ran = [(c.kind, c.axis, c.shape, c.dtype) for c in issued]
    differing = [pair for pair in zip(ran, predicted * STEPS, strict=False) if pair[0] != pair[1]]
    assert ran == predicted * STEPS, f"{len(ran)} ran, {STEPS} x {len(predicted)} predicted: {differing[:3]}"
    assert len(predicted) == len(plan.collectives)
    return Trained(trained.losses, {n: p.full_tensor() for n, p in trained.parameters.items() if isinstance(p, DTensor)})


def _train(case: Case, model: nn.Module, call: Callable[[], Any]) -> Trained:
    optimizer, losses = torch.optim.SGD(model.parameters(), case.rate), []
    for _ in range(STEPS):
        outputs = [o for o in torch.utils._pytree.tree_leaves(call()) if isinstance(o, Tensor) and o.requires_grad]
        loss = torch.stack([o.sum() for o in outputs]).sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(losses, {n: p.detach() for n, p in model.named_parameters()})
