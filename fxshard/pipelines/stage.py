"""A stage on its ranks: a module sharded over the other axes, as a ``PipelineStage`` for torch's schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from fxshard.errors import OptionError, PlanError, closest
from fxshard.layout.layouts import Layout, local_shape
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.pipelines.plan import PipelinePlan, inner_mesh, plan_pipeline
from fxshard.pipelines.refusals import NO_OFFLOAD, OFFLOAD_REMEDY, check_axis, keyword_arguments
from fxshard.pipelines.sizes import check_microbatch, check_received
from fxshard.pipelines.split import Passed, StageModule, split
from fxshard.runtime.calls.inputs import as_dtensor
from fxshard.runtime.calls.options import check_device_mesh, check_unused
from fxshard.runtime.module.accumulation import no_sync
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.optim.clipping import clip
from fxshard.runtime.ranks.agreement import TIMEOUT, Meeting, default_group
from fxshard.runtime.ranks.launch import compare, ends_together, mesh_ranks

PLANNING = ("parallel", "optimizer", "mixed_precision", "time_limit", "cache")
"""Options for planning both the layers and the module of a stage."""
RUNNING = ("compiler", "timeout", "debug", "dump", "without", "src_data_rank")
"""Options of ``parallelize`` for the module of a stage."""


@dataclass(frozen=True)
class Border:
    """A value between stages: whole, and on this rank."""

    value: Passed
    layout: Layout
    local: tuple[int, ...]

    def example(self) -> torch.Tensor:
        """This rank's part, without memory."""
        return torch.empty(self.local, dtype=self.value.dtype, device="meta", requires_grad=self.value.trains)

    def distributed(self, part: torch.Tensor, device_mesh: DeviceMesh) -> DTensor:
        """This rank's part as a DTensor; its gradient has the same layout."""
        return as_dtensor(part, device_mesh, self.layout, self.value.shape)


@dataclass(frozen=True)
class Ends:
    """What a stage takes and returns."""

    inputs: tuple[Border, ...]
    outputs: tuple[Border, ...]


class ShardedStage(PipelineStage):
    """A stage of a pipeline whose ``submod`` is a parallelized module.

    Ranks with equal coordinates on the other axes send each other their parts of a value. Gradients of all microbatches are added up and
    reduced once, in the last backward of a step.
    """

    def __init__(self, module: nn.Module, plan: PipelinePlan, index: int, ends: Ends, inside: DeviceMesh, group: Any) -> None:
        device = torch.device(inside.device_type, torch.cuda.current_device()) if inside.device_type == "cuda" else torch.device("cpu")
        inputs, outputs = ([border.example() for border in side] for side in (ends.inputs, ends.outputs))
        grads = [[x.detach() if x.requires_grad else None for x in side] for side in (inputs, outputs)]
        given = {"input_args": inputs, "output_args": outputs, "input_grads": grads[0], "output_grads": grads[1]}
        super().__init__(module, index, len(plan.stages), device, group=group, **{name: tuple(side) for name, side in given.items()})
        self.plan, self.ends, self.inside = plan, ends, inside
        self.rank_stages: tuple[ShardedStage, ...] = (self,)
        """All stages of this rank, in order: two if they are interleaved."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """The forward of one microbatch. Raises SizesError if the first stage's arguments have other shapes than the plan's, before this
        microbatch is computed or sent."""
        if self.is_first:
            check_microbatch([border.value for border in self.ends.inputs], args, kwargs or {}, fwd_chunk_id, self.plan.microbatches)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of one microbatch, from this rank's parts of values to its parts."""
        given = args
        if not self.is_first:  # interleaved, a rank's schedule hands the keywords of the step to its later stage too
            check_received([border.local for border in self.ends.inputs], args, self.stage_index)
            given, kwargs = tuple(border.distributed(x, self.inside) for border, x in zip(self.ends.inputs, args, strict=True)), {}
        with self._pending():
            found = self.submod(*given, **kwargs)
        results = found if isinstance(found, tuple) else (found,)
        parts = tuple(x.to_local() if isinstance(x, DTensor) else x for x in results)
        if not self.is_last:  # what the next stage has buffers for: contiguous, in the model's dtype even with mixed precision
            parts = tuple(x.to(border.value.dtype).contiguous() for border, x in zip(self.ends.outputs, parts, strict=True))
        return parts if isinstance(found, tuple) else parts[0]

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """The backward of one microbatch; the last of a step reduces gradients over ranks."""
        with contextlib.nullcontext() if last_backward else self._pending():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *, timeout: float = TIMEOUT
    ) -> torch.Tensor:
        """Scales the gradients of this rank's stages in place by ``max_norm`` over the norm of the whole model's if that is larger; returns
        this norm, a plain scalar. Every rank of the pipeline calls this, between the steps of the schedule and of the optimiser.

        The norm is that of the gradients of all stages as one vector, as on one device. Raises as ``fxshard.clip_grad_norm_``.
        """
        across = (self.group, self.device)
        parameters = [p for stage in self.rank_stages for p in stage.submod.parameters()]
        return clip(parameters, max_norm, norm_type, error_if_nonfinite, timeout, across)

    def _pending(self) -> Any:
        return contextlib.nullcontext() if self.plan.microbatches == 1 else no_sync(self.submod)


def pipeline(
    model: nn.Module,
    mb_args: Sequence[Any],
    device_mesh: DeviceMesh,
    axis: str = "pp",
    *,
    microbatches: int,
    mb_kwargs: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    plan: PipelinePlan | None = None,
    memory_limit: float | str | None = None,
    hardware: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> ShardedStage:
    """This rank's stage of ``model``, cut along ``axis`` of ``device_mesh`` and sharded over its other axes; every rank calls this.

        stage = fxshard.pipeline(model, (tokens[:2],), device_mesh, axis="pp", microbatches=8, parallel={"dp": fxshard.FullyShard()})
        optimizer = torch.optim.AdamW(stage.submod.parameters())
        schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)              # torch.distributed.pipelining
        schedule.step(tokens) if stage.is_first else schedule.step(target=targets)

    ``stage.submod`` is a parallelized module with this stage's parameters and buffers, under their names in ``model``. Arguments go to the
    first stage, which passes on what later ones read. As in ``parallelize``, tensors are global values: a step takes the whole batch on
    each rank of the first stage, and the last stage's outputs are whole.

    With ``schedule="Interleaved1F1B"`` a rank has two stages: this is its first, and ``stage.rank_stages`` has both, for torch's
    ``ScheduleInterleaved1F1B``. The last of them is the pipeline's last stage on the last rank of ``axis``.

    Args:
        mb_args, mb_kwargs: arguments of the model for one microbatch. All microbatches have the same sizes. A step takes keyword arguments
            by name too, on the first stage. ``example_kwargs`` is another name of ``mb_kwargs``.
        microbatches: their number in a step: give the schedule the same.
        plan: a plan from ``fxshard.plan_pipeline``, the same on all ranks; by default one rank makes it for all.
        schedule, memory_limit: as in ``fxshard.plan_pipeline``. A ``plan`` must be for this schedule, and has its own limit.
        hardware: as in ``fxshard.parallelize``.
        options: ``parallel``, ``optimizer``, ``mixed_precision``, ``time_limit``, ``cache``; and, as in ``parallelize``, ``compiler``,
            ``timeout``, ``debug``, ``dump``, ``without``, ``src_data_rank``.

    Raises as ``fxshard.plan_pipeline`` and ``fxshard.parallelize``; PlanError if ``plan`` is for another model, mesh or schedule; RunError
    if the ranks differ in the plan, or another rank could not make its stage.
    """
    check_device_mesh(device_mesh)
    if "offload" in options:
        raise OptionError(NO_OFFLOAD, remedy=OFFLOAD_REMEDY)
    for name in options:
        if name not in (*PLANNING, *RUNNING):
            what = f"pipeline has no option {name!r}{closest(name, (*PLANNING, *RUNNING))}"
            raise OptionError(what, remedy=f"its options are {', '.join((*PLANNING, *RUNNING))}")
    mesh = as_mesh(device_mesh, hardware)
    check_axis(mesh, axis, microbatches, schedule)
    check_unused(plan, memory_limit=memory_limit)
    kwargs, timeout = keyword_arguments(mb_kwargs, example_kwargs), options.get("timeout", TIMEOUT)
    if plan is None:
        planning = {name: options[name] for name in PLANNING if name in options}

        def make() -> PipelinePlan:
            chosen: dict[str, Any] = {"mb_kwargs": kwargs, "schedule": schedule, "memory_limit": memory_limit}
            return plan_pipeline(model, mb_args, mesh, axis, microbatches=microbatches, **chosen, **planning)

        plan = _shared(make, device_mesh, (mesh, axis, microbatches, schedule), timeout)
    ranks = mesh_ranks(device_mesh)
    compare(_fields(plan), ranks=ranks, timeout=timeout)
    _check_plan(plan, mesh, axis, microbatches, schedule)
    rank, ranks_of_axis = device_mesh.get_local_rank(axis), device_mesh.size(mesh.axis(axis))
    inside = device_mesh[tuple(name for name in mesh.axis_names if name != axis)]
    running = {**options, "hardware": inner_mesh(mesh, axis).hardware}
    with ends_together("make its stage of the pipeline", ranks=ranks, timeout=timeout):
        every = split(model, mb_args, kwargs, plan.starts)
        found = []
        for index in range(rank, len(every), ranks_of_axis):
            ends = _ends(every[index], plan, index, inside)
            _shard(every[index], plan, index, ends, inside, running)
            found.append(ShardedStage(every[index].module, plan, index, ends, inside, device_mesh.get_group(axis)))
        for stage in found:
            stage.rank_stages = tuple(found)
        return found[0]


def _fields(plan: PipelinePlan) -> dict[str, str]:
    """What must be equal on all ranks."""
    step = {"axis": plan.axis, "microbatches": str(plan.microbatches), "schedule": plan.schedule}
    return {"mesh": str(plan.mesh), **step, "plan: the pipeline": plan.to_json()}


def _ends(stage: StageModule, plan: PipelinePlan, index: int, inside: DeviceMesh) -> Ends:
    shape, coordinate = tuple(inside.shape), inside.get_coordinate()
    assert coordinate is not None
    whole = Layout.replicated(inside.ndim)

    def borders(values: Sequence[Passed], between: bool) -> tuple[Border, ...]:
        layouts = [_planned_layout(plan, v.name) if between else whole for v in values]
        return tuple(Border(v, x, local_shape(v.shape, x, shape, coordinate)) for v, x in zip(values, layouts, strict=True))

    return Ends(borders(stage.inputs, index > 0), borders(stage.outputs, index < len(plan.stages) - 1))


def _planned_layout(plan: PipelinePlan, name: str) -> Layout:
    if name not in plan.layouts:
        what = f"the plan has no layout for {name!r}, which passes between stages: it is for another model{closest(name, plan.layouts)}"
        raise PlanError(what, remedy="plan this model with fxshard.plan_pipeline, or leave out the plan")
    return plan.layouts[name]


def _shard(stage: StageModule, plan: PipelinePlan, index: int, ends: Ends, inside: DeviceMesh, options: dict[str, Any]) -> None:
    """Parallelizes the module of a stage: its arguments and results between stages are DTensors, others whole."""
    examples = [border.distributed(border.example(), inside) if index else border.example() for border in ends.inputs]
    outputs = {f"outputs[{i}]": border.layout for i, border in enumerate(ends.outputs)}
    limit = plan.stages[index].memory_limit
    parallelize(stage.module, examples, inside, train=True, output_layouts=outputs, memory_limit=limit, **options)


def _shared(make: Callable[[], PipelinePlan], device_mesh: DeviceMesh, fields: tuple[Mesh, str, int, str], timeout: float) -> PipelinePlan:
    """The plan that the lowest rank of ``device_mesh`` makes, on all of them."""
    group = default_group(mesh_ranks(device_mesh))
    if group is None:
        return make()
    with Meeting(group, "plan the pipeline", timeout=timeout) as meeting:
        if meeting.leads:
            plan = make()
            meeting.everyone()
            meeting.decide(plan.to_json())
            return plan
        text = meeting.outcome()
    return PipelinePlan.from_json(text, *fields)


def _check_plan(plan: PipelinePlan, mesh: Mesh, axis: str, microbatches: int, schedule: str) -> None:
    have = (mesh.axis_names, mesh.shape, axis, microbatches)
    if (plan.mesh.axis_names, plan.mesh.shape, plan.axis, plan.microbatches) != have:
        asked = f"{microbatches} on {axis} of {mesh}"
        what = f"the plan is for {plan.microbatches} microbatches on axis {plan.axis} of mesh {plan.mesh}, not {asked}"
        raise PlanError(what, remedy="plan for this mesh and number of microbatches")
    if plan.schedule != schedule:
        remedy = f"pass schedule={plan.schedule!r}, or plan for {schedule}: the stages then hold other numbers of microbatches"
        raise PlanError(f"the plan is for the schedule {plan.schedule}, not {schedule}", remedy=remedy)
