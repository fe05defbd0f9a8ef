"""The stages of a pipeline: which layers each holds, and what a step takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.byte_sizes import beyond_device, exact_size, read_size, size_text
from fxshard.errors import ConstraintError, count_text
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.passes.pipeline import Request
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, check_mixed_precision
from fxshard.passes.trace.trace import check_call
from fxshard.pipelines.cut import Chain, best_cut, bounds, least_memory
from fxshard.pipelines.prices import price
from fxshard.pipelines.refusals import check_axis, check_modules, fixed_starts, keyword_arguments, no_cut, parameters_of
from fxshard.pipelines.schedule import bubble, in_flight, stages_of_rank, step_time
from fxshard.pipelines.split import split_layers
from fxshard.plans.parallel import left_whole, read_parallel
from fxshard.runtime.calls.options import with_known_options
from fxshard.runtime.distributed_already import check_whole
from fxshard.text_table import fitted


@dataclass(frozen=True)
class PlannedStage:
    """``layers``: names of its layers; ``time``: predicted microseconds for the forward and backward of one microbatch, transfers included;
    ``memory``: bytes on a device at the peak, while it holds the saved values of ``in_flight`` microbatches. ``memory_limit``: of the plan
    of its module, for one microbatch, if there is a limit: the pipeline's without what the stage holds beside it."""

    layers: tuple[str, ...]
    time: float
    memory: int
    in_flight: int
    memory_limit: int | None = None


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut into stages along ``axis`` of ``mesh``; ``print(plan)`` shows them.

    ``layouts``: the layouts, on the other axes, of the values that pass between stages, by name.
    """

    mesh: Mesh
    axis: str
    microbatches: int
    schedule: str
    stages: tuple[PlannedStage, ...]
    layouts: Mapping[str, Layout]

    @property
    def starts(self) -> tuple[str, ...]:
        """The first layer of each stage but the first."""
        return tuple(stage.layers[0] for stage in self.stages[1:])

    @property
    def several(self) -> int:
        """How many stages a rank has: of p ranks, rank r has the stages r, p + r, and so on."""
        return stages_of_rank(self.schedule)

    @property
    def step_time(self) -> float:
        """Predicted microseconds of a step of all microbatches, without the optimiser's."""
        return step_time([stage.time for stage in self.stages], self.microbatches, self.several)

    @property
    def bubble(self) -> float:
        """The part of the step in which a stage waits, on average, 0 to 1."""
        return bubble([stage.time for stage in self.stages], self.microbatches, self.several)

    def __str__(self) -> str:
        rows = [(i, _span(s.layers), len(s.layers), f"{s.time:,.0f}", size_text(s.memory), s.in_flight) for i, s in enumerate(self.stages)]
        table = fitted(rows, ("stage", "layers", "count", "us", "memory", "in flight"), same=False)
        head = f"mesh {self.mesh}: {count_text(len(self.stages), 'stage')} on axis {self.axis}, {self.schedule}"
        count = "1 microbatch takes" if self.microbatches == 1 else f"{self.microbatches} microbatches take"
        last = f"{count} {self.step_time:,.0f} us"
        ranks, hardware = len(self.stages) // self.several, self.mesh.hardware
        most = max(sum(stage.memory for stage in self.stages[rank::ranks]) for rank in range(ranks))
        told = beyond_device(most, hardware.memory, hardware.name)
        beyond = f"\n\nDoes not fit: {told}" if told else ""
        return f"{head}\n\n{table}\n\n{last}; bubble {self.bubble:.1%}. Times and memory are predicted, per microbatch and device.{beyond}"

    def to_json(self) -> str:
        stages = [asdict(stage) for stage in self.stages]
        return json.dumps({"stages": stages, "layouts": {name: str(layout) for name, layout in self.layouts.items()}})

    @classmethod
    def from_json(cls, text: str, mesh: Mesh, axis: str, microbatches: int, schedule: str) -> PipelinePlan:
        data = json.loads(text)
        stages = tuple(PlannedStage(**{**stage, "layers": tuple(stage["layers"])}) for stage in data["stages"])
        layouts = {name: Layout.parse(layout) for name, layout in data["layouts"].items()}
        return cls(mesh, axis, microbatches, schedule, stages, layouts)


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def inner_mesh(mesh: Mesh, axis: str) -> Mesh:
    """The axes inside a stage, with the links that they have in ``mesh``."""
    axes = {name: size for name, size in zip(mesh.axis_names, mesh.shape, strict=True) if name != axis}
    alone = Mesh(axes, mesh.hardware)
    links = {name: mesh.link(mesh.axis(name)) for name in axes}
    differing = {name: link for name, link in links.items() if link != alone.link(alone.axis(name))}
    return Mesh(axes, mesh.hardware, differing) if differing else alone


@with_known_options
def plan_pipeline(
    model: nn.Module,
    mb_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    axis: str = "pp",
    *,
    microbatches: int,
    mb_kwargs: Mapping[str, Any] | None = None,
    schedule: str = "1F1B",
    parallel: Any = None,
    memory_limit: float | str | None = None,
    optimizer: Any = "none",
    mixed_precision: MixedPrecision | None = None,
    time_limit: float | None = None,
    cache: bool = True,
    example_kwargs: Mapping[str, Any] | None = None,
) -> PipelinePlan:
    """Cuts ``model`` into stages, one for each rank of ``axis`` (two if they are interleaved), so that a step takes the least time. Needs
    no process group and no weights in memory.

    Stages begin with layers: modules in the model's outermost ``ModuleList``, ``Sequential`` or ``ModuleDict``. fxshard plans each layer on
    the other axes; of all cuts that fit into memory, the one with the least predicted time of a step is chosen, exactly
    (docs/pipelines.md).

    Args:
        mb_args, mb_kwargs: arguments of the model for one microbatch; meta tensors will do. ``example_kwargs``, as in ``fxshard.plan``, is
            another name of ``mb_kwargs``.
        microbatches: number of microbatches in a step, at least the number of ranks of ``axis``.
        schedule: ``"1F1B"``; ``"GPipe"``, which holds all microbatches of a step at once; or ``"Interleaved1F1B"``, in which a rank has two
            stages, and waits about half as long.
        parallel: one-word plans of the other axes, as in ``fxshard.plan``.
        memory_limit: most bytes on a device (``"80GB"``), with the optimiser's state, gradients and the microbatches in flight. Without
            what a stage holds beside one microbatch, it is the limit of the plan of the stage's module.
        optimizer, mixed_precision, time_limit, cache: as in ``fxshard.plan``; ``time_limit`` is for each of its plans.

    Raises:
        OptionError: an unknown axis or schedule, too few microbatches, or keyword arguments by both names. PlanError: the model has no list
        of layers, or has what a pipeline does not support: tied parameters, batch norm, random operators, buffers that it writes.
        ConstraintError: nothing fits in the memory limit. TraceError: torch.export cannot export the model.
    """
    check_call(model, mb_args, fsdp2=True)
    kwargs = keyword_arguments(mb_kwargs, example_kwargs)
    check_whole(model, mb_args, kwargs, "give the plain model and plain arguments; for the other axes, say parallel=")
    whole_mesh = as_mesh(mesh)
    check_axis(whole_mesh, axis, microbatches, schedule)
    check_modules(model)
    limit = math.inf if memory_limit is None else read_size(memory_limit, "memory_limit")
    args, inside = tuple(mb_args), inner_mesh(whole_mesh, axis)
    stages = whole_mesh.shape[whole_mesh.axis(axis)] * stages_of_rank(schedule)
    names, pieces = split_layers(model, args, kwargs)
    tied = fixed_starts(names, [parameters_of(piece.module) for piece in pieces], model)
    if len(names) - len(tied) < stages:
        raise no_cut(tied, names, stages)
    words = read_parallel(parallel, inside)
    request = Request(
        model,
        args,
        kwargs,
        input_layouts=left_whole(words, inside),
        output_layouts="R" * inside.ndim,
        time_limit=time_limit,
        optimizer=optimizer,
        cache=cache,
        mixed_precision=check_mixed_precision(mixed_precision),
        parallel=words,
    )
    priced = price(names, pieces, request, inside, whole_mesh.link(whole_mesh.axis(axis)))
    chain = Chain(tuple(priced.layers), stages, microbatches, schedule).with_fixed(tied)
    return _planned(chain, whole_mesh, axis, priced.layouts, limit)


def _planned(chain: Chain, mesh: Mesh, axis: str, layouts: Mapping[str, Layout], limit: float) -> PipelinePlan:
    cut = best_cut(chain, limit)
    if cut is None:
        least = least_memory(chain)
        assert least is not None, "the caller has checked that there is a cut"
        what = f"no cut into {chain.stages} stages fits in memory_limit={exact_size(round(limit))} per device"
        remedy = f"raise the limit: some cut needs {exact_size(least)}; or use smaller microbatches, more stages or larger inner axes"
        raise ConstraintError(what, where=f"mesh {mesh}", remedy=remedy)
    stages = []
    for i, (first, end) in enumerate(bounds(cut, len(chain.layers))):
        several = in_flight(chain.schedule, i, chain.stages, chain.microbatches)
        layers = tuple(layer.name for layer in chain.layers[first:end])
        own = None if limit == math.inf else round(limit) // chain.several - chain.beside(i, first, end)
        stages.append(PlannedStage(layers, chain.time(first, end), chain.memory(i, first, end), several, own))
    return PipelinePlan(mesh, axis, chain.microbatches, chain.schedule, tuple(stages), layouts)
