"""The front door: composition of passes and runtime, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.errors import OptionError
from fxshard.mesh import Mesh, as_mesh
from fxshard.passes.pipeline import PLANNING, Compilation, Request, lower_plan, run
from fxshard.passes.trace import trace
from fxshard.program import ShardedProgram
from fxshard.runtime.simulate import Simulation, simulate_program
from fxshard.runtime.values import program_values
from fxshard.sharding_plan import ShardingPlan


def plan(
    model: nn.Module,
    example_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    example_kwargs: Mapping[str, Any] | None = None,
    train: bool = True,
    input_layouts: Any = None,
    output_layouts: Any = None,
    pins: Mapping[str, Any] | ShardingPlan | None = None,
    memory_limit: int | None = None,
    objective: str = "time",
    time_limit: float | None = None,
    dump: str | Path | None = None,
) -> ShardingPlan:
    """The cheapest placement of ``model`` on ``mesh``, with a certificate.

    Needs no process group, no GPU and no weights in memory (a model on meta will do).

    Args:
        input_layouts: layouts of tensor inputs: one for all, a sequence in order (None: free), or a mapping by name
            (``"args[0]"``, ``"kwargs['mask']"``). Free where not given.
        output_layouts: likewise for outputs (``"outputs[0]"``).
        pins: layouts by name or glob of parameters, buffers, inputs or graph nodes; or a (partial) ShardingPlan.
        memory_limit: bytes per device for what ``plan.memory`` counts.
        objective: ``"time"`` (microseconds) or ``"communication"`` (bytes sent per rank).
        time_limit: seconds for the solver; a plan cut by it says so (``plan.certificate.cut``).
        dump: folder for one readable file per pass.

    Raises:
        TraceError: the model is not one graph. ConstraintError: a pin matches nothing, or constraints contradict.
        LayoutError: a layout that cannot be.
    """
    request = Request(
        model, tuple(example_args), dict(example_kwargs or {}), train, input_layouts, output_layouts, pins, memory_limit, objective, time_limit
    )
    state = run(PLANNING, Compilation(as_mesh(mesh), request), dump)
    assert state.plan is not None
    return state.plan


def program(
    model: nn.Module,
    example_args: Sequence[Any],
    plan: ShardingPlan,
    example_kwargs: Mapping[str, Any] | None = None,
    dump: str | Path | None = None,
) -> ShardedProgram:
    """``model`` lowered by ``plan``; raises PlanError when the plan is for another model, shape or mode."""
    graph = trace(model, example_args, example_kwargs, train=plan.train)
    return lower_plan(graph, plan, dump)


def simulate(
    model_or_program: nn.Module | ShardedProgram,
    args: Sequence[Any],
    plan: ShardingPlan | None = None,
    kwargs: Mapping[str, Any] | None = None,
    tangents: Any = None,
    mesh: Mesh | DeviceMesh | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Simulation:
    """Runs all ranks in this process, in lock-step.

    Args:
        plan: the plan to run; for a model without one, ``mesh`` must be given and a training plan is made.
        tangents: gradients of the outputs, in their structure; ones by default.
        weights: parameters and buffers by name, for a program that does not carry its own.

    Returns:
        ``.outputs``, ``.grads`` (by parameter name, for a training plan), ``.mutations`` and ``.collectives``; tensors are global.
    """
    model = model_or_program if isinstance(model_or_program, nn.Module) else None
    lowered = model_or_program if isinstance(model_or_program, ShardedProgram) else None
    if model is not None:
        if plan is None and mesh is None:
            raise OptionError("simulating a model takes a plan or a mesh", remedy="pass plan=fxshard.plan(...) or mesh=fxshard.Mesh(...)")
        if plan is None:
            plan = globals()["plan"](model, args, mesh, kwargs)
        lowered = program(model, args, plan, kwargs)
    if lowered is None:
        raise OptionError(f"cannot simulate a {type(model_or_program).__name__}", remedy="pass an nn.Module or a ShardedProgram")
    return simulate_program(lowered, program_values(lowered, model, args, kwargs, tangents, weights))
