"""The public functions: each composes passes and the runtime, and does nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard.archive.planning import Planning
from fxshard.errors import OptionError, a_kind
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.ops.random import GENERATORS
from fxshard.passes.after_lowering.optimise import check_without
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import Request, lower_plan, trace_model
from fxshard.passes.planning.origin import Origin
from fxshard.passes.planning.sizes_of_plan import check_legal
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision, check_mixed_precision, check_runs
from fxshard.passes.trace.optimizer_step import with_step
from fxshard.passes.trace.trace import check_call
from fxshard.plans.comparison import Comparison, compare
from fxshard.plans.constraints import Constraint, check_constraints
from fxshard.plans.offload import read_offload
from fxshard.plans.parallel import left_whole, read_parallel
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.ahead.compile_ahead import BACKENDS, compile_ahead
from fxshard.runtime.calls.inputs import local_batch
from fxshard.runtime.calls.options import check_choice, check_flag, check_pins, check_plan, check_unused, with_known_options
from fxshard.runtime.distributed_already import check_whole, plan_as_held, traced_as_held
from fxshard.runtime.exported import ExportedProgram, as_planned, lower_for_sizes
from fxshard.runtime.module.module import parallelize
from fxshard.runtime.simulate.per_rank import RankValues, coordinates, per_rank, shard
from fxshard.runtime.simulate.reductions import check_reduction
from fxshard.runtime.simulate.simulate import Simulation, simulate_program, simulated_mesh
from fxshard.runtime.simulate.values import program_values, returned_by_model, sizes_of_call
from fxshard.shapes import dynamic_dims, weighted_sizes

WHOLE = "give the plain model and plain arguments, and the layouts as pins=, input_layouts= or parallel="
SIMULATED = "simulate fxshard.lower(model, args, plan) with weights={name: whole tensor}, or give the plain model and plain arguments"
"""What to do where ``export`` and ``simulate`` get DTensors."""


@with_known_options
def plan(
    model: nn.Module,
    example_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    example_kwargs: Mapping[str, Any] | None = None,
    train: bool = True,
    input_layouts: Any = None,
    output_layouts: Any = None,
    pins: Mapping[str, Any] | ShardingPlan | None = None,
    memory_limit: float | str | None = None,
    objective: str = "time",
    time_limit: float | None = None,
    dump: str | Path | None = None,
    constraints: Sequence[Constraint] | None = None,
    optimizer: Any = "none",
    cache: bool = True,
    mixed_precision: MixedPrecision | None = None,
    dynamic_shapes: Any = None,
    example_sizes: Any = None,
    parallel: Any = None,
    offload: Any = False,
) -> ShardingPlan:
    """The cheapest placement of ``model`` on ``mesh``, with a certificate.

    Needs no process group, no GPU and no weights in memory (a model on meta will do). A norm or softmax is traced as several operators,
    which are planned as one unit: the certificate covers only plans in which all of them read a value in the same layout.

    DTensors among the model's parameters and the arguments keep their layouts, as in ``parallelize``, torch's ``fully_shard`` included;
    buffers that are DTensors must be replicated. Nothing is sent, and the model stays as it is, though ``fully_shard`` reshards it.

    Args:
        input_layouts: layouts of tensor inputs: one for all, a sequence in order, or a mapping by name (``"args[0]"``,
            ``"kwargs['mask']"``). The solver chooses those that are not given or None.
        output_layouts: the same for outputs (``"outputs[0]"``).
        pins: a mapping from names or globs to layouts, or a ShardingPlan, which may be partial. Names are those of parameters, buffers,
            inputs, outputs, submodules (for what they return) and graph nodes. A submodule or node with several results takes a tuple,
            with None for results that the solver places.
        memory_limit: most bytes on a device at any time (a number, ``"80GB"`` or ``"64GiB"``). Counts parameters, the optimiser's state,
            gradients, values saved for the backward, copies of values in other layouts, and the workspace of operators and
            redistributions; ``plan.memory`` gives the peak by kind. The limit holds up to the largest sizes of dynamic dims
            (``Dim("batch", max=64)``); for a dim without ``max``, ``plan.holds_up_to()`` says how far.
        objective: ``"time"`` (microseconds) or ``"communication"`` (bytes sent per rank).
        time_limit: seconds for the solver; ``plan.certificate.cut`` says whether the limit cut the search short. Tracing does not count,
            nor does compiling the solver's loops, once after installation. If no plan fits, finding out why may take five seconds more.
        dump: folder for one readable file per pass.
        constraints: any number of ``Pin``, ``Equal``, ``Forbid`` and ``Communication``, in addition to the arguments above.
        optimizer: the optimiser whose state counts as memory: ``"none"``, ``"sgd"``, ``"sgd_momentum"``, ``"adamw"``, ..., a class or
            instance of ``torch.optim``, or a ``fxshard.Optimizer``, which also gives the dtype of the state.
        cache: whether to use a plan that an earlier call with equal arguments stored on disk, and to store this one. The folder is
            ``FXSHARD_CACHE_DIR``, by default ``~/.cache/fxshard``; ``FXSHARD_CACHE=0`` switches the cache off for all calls.
        mixed_precision: dtypes in which to compute and to reduce gradients; parameters and gradients keep theirs. With its
            ``gathers="fp8"`` the plan can be compared, but not run.
        dynamic_shapes: dims whose sizes may change, in the form of ``torch.export`` or by path:
            ``{"args[0]": {0: Dim("batch"), 1: "seq"}}``. Dims marked by ``mark_dynamic`` are dynamic too. The plan is optimised for the
            example's sizes, but uses only placements that are legal at other sizes too; ``plan.at(batch=4)`` gives its cost there
            (docs/dynamic-shapes.md).
        example_sizes: sizes of the dynamic dims over which the objective is averaged, in place of the example's: tuples in the order of
            the dims or mappings by name, ``[(8, 2048), (64, 1)]``, or pairs of sizes and a weight, ``[((8, 2048), 3), ((64, 1), 1)]``.
        parallel: one-word plans by axis, ``{"dp": FullyShard(), "tp": "auto"}`` (fxshard.plans.parallel, docs/parallel-styles.md). They say
            a few layouts; pins and layouts given for the same tensor and axis count instead, and the solver chooses the rest.
        offload: what the solver may hold in the memory of the host to keep the ``memory_limit``, for each parameter: ``"optimizer"``, the
            state of its optimiser; ``"parameters"``, the parameter too; both in a tuple, or True (docs/memory.md). A whole plan given as
            ``pins`` decides this itself: what it holds on the host stays there, and nothing else goes, whatever ``offload`` is.

    The plan keeps what it was made from, so that ``plan.explain(name)`` can say what other layouts would cost. Copies of it and plans read
    from files cannot.

    Raises:
        TraceError: the model cannot be traced to one graph. ConstraintError: a name matches nothing, or constraints contradict each other.
        LayoutError: an invalid layout. SizesError: no plan serves the sizes of the dynamic dims. OptionError: a DTensor on another mesh, a
        sharded buffer, or an argument on a part of the mesh.
    """
    check_call(model, example_args, fsdp2=True)
    check_pins(pins)
    dims = dynamic_dims(model, tuple(example_args), dict(example_kwargs or {}), dynamic_shapes)
    request = Request(
        model,
        tuple(example_args),
        dict(example_kwargs or {}),
        train,
        input_layouts,
        output_layouts,
        pins,
        memory_limit,
        objective,
        time_limit,
        check_constraints(constraints),
        optimizer,
        cache,
        mixed_precision=check_mixed_precision(mixed_precision),
        dynamic=dims,
        sampled=weighted_sizes(example_sizes, dims),
        parallel=read_parallel(parallel, as_mesh(mesh)),
        offload=read_offload(offload),
    )
    state = plan_as_held(request, mesh, dump)
    assert state.plan is not None and state.annotated is not None and state.constraints is not None
    return state.plan.made_by(
        Origin(state.annotated, state.constraints, objective, time_limit, state.formulation, state.session, state.cached)
    )


_make_plan = plan


def diff(before: ShardingPlan, after: ShardingPlan) -> Comparison:
    """The differences between two plans: layouts, redistributions, collectives, objective and memory.

    Nodes are matched by name, so plans of different graphs can be compared too. ``print(diff(a, b))`` is short for equal plans.
    """
    check_plan(before)
    check_plan(after)
    return compare(before, after)


@with_known_options
def lower(
    model: nn.Module,
    example_args: Sequence[Any],
    plan: ShardingPlan,
    example_kwargs: Mapping[str, Any] | None = None,
    dump: str | Path | None = None,
    rng: str = "fxshard",
    without: Sequence[str] = (),
    mixed_precision: MixedPrecision | None = None,
    dynamic_shapes: Any = None,
) -> ShardedProgram:
    """``model`` lowered by ``plan``; raises PlanError if the plan is for another model, shape or mode.

    ``without``: names of passes after lowering to leave out; ``program.effects`` says what each pass did (docs/after-lowering.md).
    ``rng``: with ``"fxshard"``, random numbers do not depend on the mesh; with ``"torch"``, torch's generator draws each shard separately.
    ``mixed_precision``, ``dynamic_shapes``: as the plan was made with; the program serves all sizes of the dynamic dims.
    """
    check_call(model, example_args, fsdp2=True)
    check_plan(plan)
    check_runs(check_mixed_precision(mixed_precision))
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    dims = dynamic_dims(model, args, kwargs, dynamic_shapes)
    request = Request(model, args, kwargs, plan.train, mixed_precision=mixed_precision, dynamic=dims)
    return lower_plan(traced_as_held(request, plan.mesh, dump), plan, dump, rng, without)


@with_known_options
def export(
    model: nn.Module,
    example_args: Sequence[Any],
    mesh: Mesh | DeviceMesh,
    plan: ShardingPlan | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    input_layouts: Any = None,
    output_layouts: Any = None,
    pins: Mapping[str, Any] | ShardingPlan | None = None,
    memory_limit: float | str | None = None,
    objective: str = "time",
    dump: str | Path | None = None,
    constraints: Sequence[Constraint] | None = None,
    cache: bool = True,
    rng: str = "fxshard",
    without: Sequence[str] = (),
    dynamic_shapes: Any = None,
    even: bool = False,
    example_sizes: Any = None,
    parallel: Any = None,
    train: bool = False,
    optimizer: Any = None,
    replan: bool = False,
    aot_inductor: bool | str = False,
) -> ExportedProgram:
    """Plans and lowers ``model`` on ``mesh``, ahead of time: one program for all ranks, with its plan and weights.

    Needs no process group. Inputs and outputs are replicated unless layouts are given for them, or ``parallel`` says otherwise.
    ``program.save("m.pt2")`` writes the program, ``fxshard.load("m.pt2").bind(device_mesh)`` runs it.

    ``dynamic_shapes``: dims whose sizes may change, as in ``plan``; all other dims keep the example's size. One graph for all ranks then
    serves all sizes, odd ones too. With ``even`` it serves even sizes only, which needs fewer copies, and so it does if a ``plan`` is
    given; ``program.refuses(sizes)`` says why it does not serve some sizes.
    ``train``: whether the program has a backward too: its parameters then get gradients, as those of the model do. With an ``optimizer``
    (an SGD, Adam or AdamW of ``torch.optim`` for the model's parameters, its class, or a partial of it), the program is a whole training
    step: a call takes a batch, returns what the model returns, and updates parameters and state, which are parameters named
    ``optimizer...`` of the bound module (docs/export.md).

    ``replan``: whether the program holds its planning graph, and so runs on any mesh: ``bind`` for another one plans it again.

    ``aot_inductor``: whether to compile the program too, one model per size class, for the CPU over gloo or for CUDA over NCCL: ``"cpu"``,
    ``"cuda"``, or True for CUDA where there is one. The code runs on machines like this one, from Python by
    ``bind(device_mesh, compiler="aot_inductor")`` and from C++ (docs/export.md). Not with a backward without an ``optimizer``.

    ``rng`` and ``without`` are those of ``lower``, all other arguments and errors those of ``plan``. A ``plan`` must have been made with
    the same ``train``; layouts, pins, limits, ``example_sizes`` or an ``optimizer`` beside it raise OptionError.
    """
    check_call(model, example_args, fsdp2=True)
    check_whole(model, example_args, example_kwargs, WHOLE)
    check_pins(pins)
    check_flag("even", even)
    check_flag("train", train)
    check_flag("replan", replan)
    target = _compiled_for(aot_inductor)
    if optimizer is not None and not train:
        raise OptionError("an optimizer is for a training program", where="optimizer", remedy="give train=True, or leave it out")
    others = {"input_layouts": input_layouts, "output_layouts": output_layouts, "memory_limit": memory_limit}
    others |= {"constraints": constraints or None, "example_sizes": example_sizes, "parallel": parallel, "optimizer": optimizer}
    check_unused(plan, pins=pins, **others, objective=objective)
    dims = dynamic_dims(model, tuple(example_args), dict(example_kwargs or {}), dynamic_shapes)
    words, whole = read_parallel(parallel, as_mesh(mesh)), "R" * as_mesh(mesh).ndim
    request = Request(
        model,
        tuple(example_args),
        dict(example_kwargs or {}),
        train,
        left_whole(words, as_mesh(mesh)) if input_layouts is None else input_layouts,
        whole if output_layouts is None else output_layouts,
        pins,
        memory_limit,
        objective,
        constraints=check_constraints(constraints),
        cache=cache,
        rng=rng,
        without=check_without(without),
        dynamic=dims,
        sampled=weighted_sizes(example_sizes, dims),
        parallel=words,
    )
    if even and not request.dynamic:
        raise OptionError("even=True is for dynamic sizes, and there are none", remedy="give dynamic_shapes, or leave even out")
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if plan is not None:
        check_plan(plan, mesh)
        if plan.train != train:
            of = "training" if plan.train else "inference"
            raise OptionError(f"the plan is for {of}, train={train} asks for the other", remedy=f"plan with train={train}")
        if plan.offloaded:
            what = "the plan holds parameters on the host, and an exported program keeps its weights on the device"
            raise OptionError(what, remedy="plan without offload, or run the plan with fxshard.parallelize")
    graph = trace_model(request, as_mesh(mesh), dump) if replan or optimizer is not None else None
    if graph is not None and optimizer is not None:
        graph, state = with_step(graph, model, optimizer)
        weights |= state
        request = replace(request, train=False)
    if plan is None:
        lowered = lower_for_sizes(request, as_mesh(mesh), dump, even=even, graph=graph)
    elif graph is None:
        lowered = lower(model, example_args, plan, example_kwargs, dump, rng, without, dynamic_shapes=dynamic_shapes)
    else:
        lowered = lower_plan(graph, plan, dump, rng, without)
    planning = Planning(as_planned(graph, lowered.plan), rng, request.without) if graph is not None and replan else None
    return ExportedProgram.of(lowered, weights, planning=planning, compiled=compile_ahead(lowered, target) if target else None)


def _compiled_for(aot_inductor: bool | str) -> str:
    """The device for which to compile ahead of time, "" for none."""
    if isinstance(aot_inductor, bool):
        return ("cuda" if torch.cuda.is_available() else "cpu") if aot_inductor else ""
    check_choice("aot_inductor", aot_inductor, tuple(BACKENDS))
    return aot_inductor


def load(path: str | Path) -> ExportedProgram:
    """Reads a program that ``export`` wrote; the file is data, nothing in it is run. Raises FileError with the reason."""
    return ExportedProgram.load(path)


class Simulate:
    """``fxshard.simulate(...)`` runs all ranks of a model in this process; its methods run plain functions on each rank's values."""

    def __call__(
        self,
        model_or_program: nn.Module | ShardedProgram,
        args: Sequence[Any],
        plan: ShardingPlan | None = None,
        kwargs: Mapping[str, Any] | None = None,
        tangents: Any = None,
        mesh: Mesh | DeviceMesh | None = None,
        weights: Mapping[str, torch.Tensor] | None = None,
        reduction: str = "exact",
        rng: str | None = None,
        mixed_precision: MixedPrecision | None = None,
    ) -> Simulation:
        """Runs all ranks, up to 64, in this process, in lock-step.

        Args:
            plan: the plan to run; for a model without one, ``mesh`` must be given and a training plan is made.
            tangents: gradients of the outputs, in their structure; ones by default.
            weights: parameters and buffers by name, for a program that does not carry its own.
            reduction: the order in which the ranks' tensors are added, in their dtype: ``"exact"`` (rank order), ``"gloo"`` or ``"nccl"``
                (the order of their rings).
            rng, mixed_precision: for a model, as in ``lower``; a program has its own.

        Returns:
            ``.outputs``, ``.grads`` (by parameter name, for a training plan), ``.mutations`` and ``.collectives``; tensors are global.
            ``.ranks`` gives each rank's local tensors by name.

        Raises:
            OptionError: an invalid option, or a mesh of more than 64 ranks. RunError: ranks that issue different collectives, replicas
            that differ, tensors of other shapes or dtypes than the example's, or tensors without memory.
        """
        check_reduction(reduction)
        if isinstance(model_or_program, nn.Module):
            check_whole(model_or_program, args, kwargs, SIMULATED)
        check_runs(check_mixed_precision(mixed_precision))
        lowered = _lowered(model_or_program, args, plan, kwargs, mesh, rng, check_mixed_precision(mixed_precision))
        lowered = program_at(lowered, sizes_of_call(lowered, args, kwargs))
        if weights is None and isinstance(model_or_program, ExportedProgram):
            weights = model_or_program.whole_weights
        model = model_or_program if isinstance(model_or_program, nn.Module) else None
        simulation = simulate_program(lowered, program_values(lowered, model, args, kwargs, tangents, weights), reduction)
        return replace(simulation, outputs=returned_by_model(simulation.outputs, args, kwargs, simulation.mutations))

    def shard(self, value: torch.Tensor, layout: Layout | str, mesh: Mesh | DeviceMesh) -> RankValues:
        """The part of the global tensor ``value`` that each rank of ``mesh`` holds in ``layout`` (``"S(0)R"``). Replicas share memory."""
        return shard(value, layout, simulated_mesh(mesh))

    def coordinates(self, mesh: Mesh | DeviceMesh) -> RankValues:
        """The coordinate of each rank of ``mesh``, for functions that need to know where they run."""
        return coordinates(simulated_mesh(mesh))

    def per_rank(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function`` to run once per rank, on that rank's values, if its arguments contain ``RankValues``. Usable as a decorator.

        It must not have side effects or communicate. The leaves of its result become ``RankValues``; without RankValues among its
        arguments it runs once, unchanged. Raises RunError, naming the rank, when it fails on one.
        """
        return per_rank(function)


simulate = Simulate()


def _graph_of(plan: ShardingPlan) -> PlanningGraph | None:
    """The graph that ``fxshard.plan`` made a plan for; None for a plan that was read from a file or copied."""
    return plan.origin.annotated.graph if isinstance(plan.origin, Origin) else None


def _lowered(
    source: nn.Module | ShardedProgram,
    args: Sequence[Any],
    plan: ShardingPlan | None,
    kwargs: Mapping[str, Any] | None,
    mesh: Mesh | DeviceMesh | None,
    rng: str | None,
    precision: MixedPrecision | None,
) -> ShardedProgram:
    """The program to simulate: ``source`` itself, or the model lowered by ``plan`` or by a plan made for ``mesh``."""
    if isinstance(source, nn.Module):
        if plan is None and mesh is None:
            raise OptionError("simulating a model takes a plan or a mesh", remedy="pass plan=fxshard.plan(...) or mesh=fxshard.Mesh(...)")
        if plan is None:
            assert mesh is not None
            plan = _make_plan(source, args, simulated_mesh(mesh), kwargs, mixed_precision=precision)
        check_plan(plan, mesh)
        graph = _graph_of(plan)
        if graph is not None and graph.family is not None:  # traced for all sizes of its dynamic dims
            return _lowered_for(graph, plan, args, kwargs, rng or GENERATORS[0])
        return lower(source, args, plan, kwargs, rng=rng or GENERATORS[0], mixed_precision=precision)
    if not isinstance(source, ShardedProgram):
        raise OptionError(f"cannot simulate {a_kind(source)}", remedy="pass an nn.Module or a ShardedProgram")
    if rng is not None:
        raise OptionError("a program has its source of random numbers already, so that rng would be ignored", remedy="leave rng out")
    if precision is not None:
        raise OptionError("a program has its casts already, so that mixed_precision would be ignored", remedy="give it to fxshard.lower")
    if plan is not None:
        raise OptionError("a program has its plan already, so that plan would be ignored", remedy="leave plan out, or pass the model")
    check_plan(source.plan, mesh)
    return source


def _lowered_for(
    graph: PlanningGraph, plan: ShardingPlan, args: Sequence[Any], kwargs: Mapping[str, Any] | None, rng: str
) -> ShardedProgram:
    """The program of a plan for dynamic dims: for even sizes, or, if a size of the call is odd, for shards of unequal lengths."""
    program = lower_plan(graph, plan, rng=rng)
    sizes = sizes_of_call(program, args, kwargs)
    if all(sizes[one.name] % one.unit == 0 for one in program.sizes):
        return program
    check_legal(plan, graph, sizes)
    loose = graph.for_shards(uneven=True)
    return lower_plan(loose, replace(plan, graph_hash=loose.hash), rng=rng)


__all__ = ["diff", "export", "load", "local_batch", "lower", "parallelize", "plan", "simulate"]
