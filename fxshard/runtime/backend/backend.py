"""The backend of ``torch.compile``: each graph that Dynamo captures is planned, sharded and compiled.

    torch.compile(model, backend="fxshard", options={"mesh": device_mesh})

Every rank of the mesh runs this with the same model and inputs. Parameters keep their layouts: plain ones stay replicated, with
replicated gradients (the computation is sharded, but memory is not saved); DTensors have DTensor gradients. Plain inputs are global
values, equal on all ranks, and plain outputs are replicated. An output that Dynamo predicts to be a DTensor is one, in the layout that it
predicts; with the options ``output_layouts`` or ``plan``, in those that they say, or that the planner chooses.

A graph is planned at its first call. A graph that Dynamo captured with symbolic sizes (``dynamic=True``, ``mark_dynamic``, or at the
second size) has one program for all even sizes and, from the first odd size on, another for all sizes, as in ``fxshard.parallelize``
(docs/dynamic-shapes.md). Each value of a number that is not a size gets a program of its own. So does each size under the option ``plan``,
and the log says so.

Limits of Dynamo, which apply before this backend sees a graph:

- With DTensor parameters or inputs, Dynamo first runs DTensor's own sharding propagation. Operators that DTensor lacks get fxshard's rules
  when this module is imported (``dtensor_rules``). Plain tensors beside DTensors (rotary tables from ``torch.arange``, plain inputs and
  buffers) need ``torch.distributed.tensor.experimental.implicit_replication()``, which affects that propagation only; what runs is
  fxshard's plan. A batch that the mesh does not divide fails where dims are flattened; ``fxshard.parallelize`` does not have that limit.

Calls of DTensor's API (``from_local``, ``to_local``, ``redistribute``, ...), as in the hooks of torch's parallel styles, become layouts of
the plan and regions on local tensors (``local_parts``; docs/compiled-dtensors.md).

Without the option ``mesh`` a call runs on the mesh of the DTensors in its graph, else on that of ``with device_mesh:`` around it, else
on the default process group as one axis. Outputs that are views of an input, or of another output, are views. docs/torch-compile.md
lists what else is supported and refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat.dtensor.rules import mesh_of_one
from fxshard._torch_compat.dynamo.compiled_autograd import compile_by_torch, in_compiled_autograd
from fxshard.errors import FxshardError, OptionError, SizesError
from fxshard.files import make_folder
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import probes
from fxshard.passes.pipeline import lower_plan, plan_graph
from fxshard.passes.planning.constrain import shown_placements
from fxshard.passes.runner import Dump
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.program.size_inputs import add_size_inputs
from fxshard.runtime.backend.backend_options import BackendOptions, backend_options
from fxshard.runtime.backend.dtensors.dtensor_rules import register_with_dtensor
from fxshard.runtime.backend.dtensors.tensor_classes import with_tensor_classes
from fxshard.runtime.backend.dynamo_graph import DynamoGraph, autocast_on_cpu, read_graph, specialised, trace_graph
from fxshard.runtime.backend.graph_outputs import Output, output_kind
from fxshard.runtime.backend.graph_requests import NamedTensors, Returned, check_weight_layouts, request_of
from fxshard.runtime.backend.graph_runner import graph_runner, with_outputs
from fxshard.runtime.backend.graph_sizes import dims_of
from fxshard.runtime.backend.mesh_of_call import ambient_mesh, mesh_context, mesh_of_dtensors
from fxshard.runtime.backend.user_plan import trace_for_plan
from fxshard.runtime.calls.dynamic_sizes import (
    UNEVEN_SIZES,
    Shapes,
    agreed_refusal,
    dynamic_dims_of_call,
    fallback_dims,
    refusal_message,
    replan_message,
    shapes_of,
    trace_with_static_fallback,
)
from fxshard.runtime.calls.inputs import check_plain_results, other_calls_text
from fxshard.runtime.calls.options import option_fields
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.compile.compile import COMPILERS, compile_program
from fxshard.runtime.compile.compiled import CompiledProgram, without_autocast
from fxshard.runtime.compile.compiler_check import start_compiler_check
from fxshard.runtime.rank_graph.bind import BoundProgram, bind, bind_graph, mesh_device
from fxshard.runtime.ranks.compared_fields import debug_field, mesh_fields, rule_fields, shape_fields, value_field, weight_fields
from fxshard.runtime.ranks.launch import agreed, announce, compare, fails_together, leader_folder, mesh_ranks, share_plan, versions
from fxshard.runtime.simulate.values import check_has_data
from fxshard.shapes import DynamicDim

register_with_dtensor()

log = logging.getLogger("fxshard")
WARN_AT_PROGRAMS = 8
"""The number of programs of one graph at which the user is warned."""


def fxshard(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; ``torch.compile`` calls this. ``options`` are the fields of ``BackendOptions``.

    The returned callable plans at its first call, so that errors reach the user unwrapped:

    Raises:
        OptionError: an unknown option, or a bad value. TraceError: a graph that cannot be planned. ConstraintError,
        LayoutError: pins or layouts that cannot be satisfied. PlanError: a plan for another graph, a DTensor on another mesh.
        RunError: ranks disagree (then see ``fxshard.local_batch``), or one is missing.
    """
    if in_compiled_autograd():
        return _compile_around_programs(module, example_inputs, (options or {}).get("compiler", COMPILERS[0]))
    try:
        found = with_tensor_classes(module, example_inputs, partial(fxshard, options=options, mode=mode, **others))
        if found is not None:
            return found
        chosen = (options or {}).get("plan") is not None or (options or {}).get("output_layouts") is not None
        graph = read_graph(module, example_inputs, predict=not chosen)
    except FxshardError as error:
        return partial(_refuse, error)
    given = {**(options or {}), "mode": mode} if mode is not None else options
    if given is not None and given.get("mesh") is not None:
        return GraphPrograms(graph, given, others)
    return MeshPrograms(graph, given, others)


def _compile_around_programs(module: fx.GraphModule, example_inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """A graph of compiled autograd, compiled without a plan: it is what ``backward`` runs before and after the backward of fxshard's
    programs, on tensors that may be this rank's own."""
    log.info("what compiled autograd captured of the backward, beside fxshard's programs, is compiled for this rank, without a plan")
    return compile_by_torch(compiler, module, example_inputs)


def _refuse(error: FxshardError, *args: Any) -> Sequence[Any]:
    raise error


class MeshPrograms:
    """The programs of one Dynamo graph without the option ``mesh``, for each mesh that it is called on."""

    def __init__(self, graph: DynamoGraph, given: Mapping[str, Any] | None, others: Mapping[str, Any]) -> None:
        self.graph, self.given, self.others = graph, dict(given or {}), others
        self.by_context: dict[Any, GraphPrograms] = {}
        self.for_dtensors: GraphPrograms | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.for_dtensors is not None:  # Dynamo guards the meshes of DTensors, so later calls have the same
            return self.for_dtensors(*args)
        place = mesh_context()
        programs = self.by_context.get(place)
        if programs is None:
            mesh = mesh_of_dtensors(self.graph.names, args) or self.graph.ends.device_mesh
            programs = GraphPrograms(self.graph, {**self.given, "mesh": mesh or ambient_mesh(args)}, self.others)
            if mesh is not None:
                self.for_dtensors = programs
            else:
                self.by_context[place] = programs
        return programs(*args)


@dataclass(frozen=True, eq=False)
class GraphProgram:
    """A program of a graph, made for a call of ``shapes`` with these ``outputs``."""

    runner: Runner
    graph: PlanningGraph
    shapes: Shapes
    outputs: Sequence[Output]


class GraphPrograms:
    """The programs of one Dynamo graph: one for each set of numbers in its calls, and more for sizes that no program serves yet."""

    def __init__(self, graph: DynamoGraph, given: Mapping[str, Any] | None, others: Mapping[str, Any]) -> None:
        self.graph, self.given, self.others = graph, given, dict(others)
        self.runners: dict[Any, Runner] = {}
        """By the key of a call; a program appears under every key that it has served."""
        self.by_numbers: dict[tuple[Any, ...], list[GraphProgram]] = {}
        """By the numbers of a call: the candidates for other sizes."""
        self.places, self.symbolic = graph.tensor_places, graph.symbolic

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.graph.ends.inputs:
            args = self.graph.ends.with_stacks(args)
        key = self._key(args) if self.symbolic else ()
        runner = self.runners.get(key)
        if runner is None:
            runner = self.runners[key] = self._find_dynamic(args) or self._make(args)
        return runner([args[i] for i in self.places] if self.symbolic else args)

    @cached_property
    def options(self) -> BackendOptions:
        if self.others:
            what = f"the backend fxshard takes no {next(iter(self.others))!r}"
            raise OptionError(what, remedy="pass options={...} or mode=... to torch.compile, nothing else")
        return backend_options(self.given or {})

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        mesh = self.options.mesh
        return mesh if isinstance(mesh, DeviceMesh) else mesh_of_one(mesh.axis_names)

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The key of a call: shapes and strides of tensors with open sizes (Dynamo guards the others), and the numbers."""
        return (*((args[i].shape, args[i].stride()) for i in self.graph.open_tensors), *self._numbers(args))

    def _numbers(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The numbers of a call that are not sizes, as keys: floats as text, because 0.0 equals -0.0 and nan does not equal itself."""
        return tuple(x.hex() if isinstance(x, float) else x for x in self._values_of_numbers(args))

    def _values_of_numbers(self, args: Sequence[Any]) -> list[Any]:
        """The numbers of a call; Dynamo may pass a float as a tensor."""
        return [x.item() if isinstance(x := args[i], torch.Tensor) else x for i in self.graph.numbers]

    def _find_dynamic(self, args: Sequence[Any]) -> Runner | None:
        """A program with dynamic sizes that serves the call, if there is one."""
        tensors = [args[i] for i in self.places]
        for planned in self.by_numbers.get(self._numbers(args), ()):
            if planned.runner.sizes and self._refusal(planned, tensors) is None:
                if all(output.computed for output in planned.outputs):
                    return planned.runner
                outputs = specialised(self.graph, args, views=True)[2]
                if list(map(output_kind, outputs)) == list(map(output_kind, planned.outputs)):
                    return with_outputs(planned.runner, outputs)
        return None

    def _refusal(self, planned: GraphProgram, tensors: Sequence[torch.Tensor]) -> str | None:
        return agreed_refusal(planned, tensors, self.device_mesh, self.options.timeout)

    @fails_together
    def _make(self, args: Sequence[Any], dims: tuple[DynamicDim, ...] | None = None, retry: bool = False) -> Runner:
        """Plans, lowers and compiles for the sizes and numbers of ``args``, and for all other sizes of ``dims``.

        ``dims``: by default the open sizes, less those that the programs so far show to be static. ``retry``: whether a program was just
        planned for this call and does not serve it. Every rank calls this, with the same sizes and numbers.
        """
        self.graph.ends.check_mesh(self.options.mesh)
        device = mesh_device(self.device_mesh).type
        if self.options.compiler == "inductor" and device == "cpu":
            start_compiler_check(self.options.cache)
        numbers, before = self._numbers(args), [p for found in self.by_numbers.values() for p in found]
        if dims is None:
            dims = self._dims(args, self.by_numbers.get(numbers, ()))
        with autocast_on_cpu(device):
            module, tensors, outputs = specialised(self.graph, args, views=self.options.plan is None)
            graph, names = self._trace(module, tensors, dims)
        dims = () if graph.family is None else graph.family.dims
        self._announce_program(args, before, dims, graph.train, retry)
        named = dict(zip(names, tensors, strict=True))
        try:
            with without_autocast(device):
                compiled = self._compile(graph, named, outputs)
        except SizesError as error:
            if not dims:
                raise
            self._log(logging.WARNING, "no program can serve all these sizes: %s", error.what)
            return self._make(args, fallback_dims(dims), retry=True)
        local = [name for name, form in graph.forms.items() if form.kind == "local"]
        shown = shown_placements(graph, self.options.planning_mesh, self._output_layouts(graph, self._returned(outputs)))
        runner = graph_runner(compiled, named, outputs, self.graph.distributed, self.options.timeout, local, shown)
        planned = GraphProgram(runner, graph, shapes_of(tensors), outputs)
        self.by_numbers.setdefault(numbers, []).append(planned)
        if len(before) + 1 == WARN_AT_PROGRAMS:
            text = "one graph was planned %d times, each time for other sizes or numbers; these change: %s"
            self._log(logging.WARNING, text, WARN_AT_PROGRAMS, self._changing(args))
        if (reason := self._refusal(planned, tensors)) is not None:  # it serves other calls, not the one that it was made for
            self._log(*refusal_message(planned, reason))
            return self._make(args, retry=True)
        self._compare({})  # a barrier: no rank waits in a collective for one that still compiles
        return runner

    def _dims(self, args: Sequence[Any], made: Sequence[GraphProgram]) -> tuple[DynamicDim, ...]:
        """The dynamic dims of the next program: the open sizes, less those that ``made``, programs for other sizes, show to be static."""
        opened = () if self._static(args) is not None else dims_of(self.graph.sizes, self.graph.names, args)
        said, what = "; ".join(map(str, opened)), "agree which sizes torch.compile left open"
        if not agreed(said, what, ranks=mesh_ranks(self.device_mesh), timeout=self.options.timeout):
            text = "sizes stay static: the ranks saw different sizes before, so torch.compile left different sizes open on them"
            self._log(logging.WARNING, text)
            return ()
        if not opened:
            return ()
        named = {self.graph.names[i]: args[i] for i in self.places}
        pairs = [(planned.runner, planned.shapes) for planned in made]
        dims, uneven = dynamic_dims_of_call(named, opened, (), pairs)
        if uneven:
            self._log(logging.INFO, UNEVEN_SIZES, ", ".join(uneven))
        return dims

    def _static(self, args: Sequence[Any]) -> str | None:
        """Why each size of this graph needs a program of its own, although Dynamo left some sizes open; None if it does not."""
        if not self.graph.sizes:
            return None
        if self.options.plan is not None:
            return "the option plan is for the sizes of one call"
        places = [(i, dim) for size in self.graph.sizes for i, dim in size.places]
        cut = next((i for i, dim in places if isinstance(x := args[i], DTensor) and any(p.is_shard(dim) for p in x.placements)), None)
        if cut is None:
            return None
        return f"{self.graph.names[cut]} is a DTensor sharded on such a dim, and each rank captures again when its own shard requires it"

    def _announce_program(
        self, args: Sequence[Any], before: Sequence[GraphProgram], dims: Sequence[DynamicDim], train: bool, retry: bool
    ) -> None:
        """Logs for which call a program is made, unless it is the graph's first; then warns if open sizes stay static."""
        other = bool(self.by_numbers.get(self._numbers(args)))
        if before:
            kind, values = "training" if train else "inference", self._values(args)
            self._log(*replan_message(retry, silent=not other), kind, values + other_calls_text(dims, {}))
        if not before and (reason := self._static(args)) is not None:
            self._log(logging.WARNING, "sizes stay static, and each is planned separately: %s", reason)

    def _values(self, args: Sequence[Any]) -> str:
        """The shapes of a call's tensors, and the numbers that differ among calls so far; for log messages."""
        tensors = [f"{self.graph.names[i]} {tuple(args[i].shape)}" for i in self.places if self.graph.kinds[i] == "input"]
        numbers = zip(self.graph.numbers, self._values_of_numbers(args), *self.by_numbers, self._numbers(args), strict=True)
        return ", ".join([*tensors, *(f"{self.graph.names[i]}={value!r}" for i, value, *keys in numbers if len(set(keys)) > 1)])

    def _changing(self, args: Sequence[Any]) -> str:
        """The names of the tensors and numbers that differ among the calls so far, including that of ``args``."""
        columns = zip([*self.graph.open_tensors, *self.graph.numbers], *self.runners, self._key(args), strict=True)
        return ", ".join(self.graph.names[i] for i, *values in columns if len(set(values)) > 1)

    def _compile(self, graph: PlanningGraph, named: NamedTensors, outputs: Sequence[Output]) -> CompiledProgram:
        """The bound program; its code is compiled on first use."""
        options, dump = self.options, self._dump(graph)
        self._compare(_fields(graph, named, options))
        if graph.family is not None:
            probes(graph.family, options.planning_mesh)  # an error in planning would reach the other ranks without its reason
        returned = self._returned(outputs)
        distributed = [one.distributed for one in returned]
        plan = self._plan(graph, named, returned, dump)
        program = lower_plan(graph, plan, dump, options.rng, options.without)
        check_weight_layouts(program, named, options.planning_mesh)
        check_plain_results(program, named, distributed)
        self._compare({"plan": plan.hash, "program": program.hash})
        kind = "training" if graph.train else "inference"
        text = "%s graph of %d nodes on %s, number of collectives: %d"
        self._log(logging.INFO, text, kind, len(graph.by_name), program.mesh, len(program.collectives))
        how = options.compiler, dump, options.timeout, options.debug, options.cache, options.mode
        return compile_program(self._bind(program), *how, True)

    def _returned(self, outputs: Sequence[Output]) -> list[Returned]:
        every = zip(self.graph.distributed, self.graph.predicted, outputs, strict=True)
        return [Returned(one, layout) for one, layout, output in every if output.computed]

    def _output_layouts(self, graph: PlanningGraph, returned: Sequence[Returned]) -> Any:
        """The layouts that are named for outputs: by the user, else those that eager execution would give."""
        names = [end.name for end in graph.outputs if end.kind == "output"]
        predicted = {name: one.layout for name, one in zip(names, returned, strict=True) if one.layout is not None}
        return self.options.output_layouts or predicted

    def _trace(
        self, module: fx.GraphModule, tensors: Sequence[torch.Tensor], dims: tuple[DynamicDim, ...]
    ) -> tuple[PlanningGraph, list[str]]:
        """(the planning graph, the names of ``tensors`` in it): those of the user's plan if it is for this graph."""
        if self.options.plan is not None:
            found = trace_for_plan(self.options.plan, self.graph, module, tensors)
            if found is not None:
                return found
        names, kinds = ([of[i] for i in self.places] for of in (self.graph.names, self.graph.kinds))
        trace = partial(trace_graph, module, tensors, names, kinds, cache=self.options.cache)
        return trace_with_static_fallback(trace, dims, self.device_mesh), names

    def _plan(self, graph: PlanningGraph, named: NamedTensors, returned: Sequence[Returned], dump: Dump) -> ShardingPlan:
        options = self.options
        if options.plan is not None and self._is_for(options.plan, graph):
            return options.plan
        if options.plan is not None and not self.by_numbers:
            kind = "training" if graph.train else "inference"
            self._log(logging.INFO, "planning again for %s: the option plan is for another graph", kind)
        request = request_of(graph, named, returned, options, self.graph.fragment, not self.by_numbers)
        make = lambda: plan_graph(graph, options.planning_mesh, request, dump)  # noqa: E731
        return share_plan(make, ranks=mesh_ranks(self.device_mesh), timeout=options.timeout, key=graph.hash)

    def _is_for(self, plan: ShardingPlan, graph: PlanningGraph) -> bool:
        """Whether to use the user's plan: if it is for this graph, or if it ought to be (lowering then raises the error)."""
        other = self.by_numbers or self.graph.fragment or plan.train != graph.train
        return plan.graph_hash == graph.hash or not other

    def _bind(self, program: ShardedProgram) -> BoundProgram:
        if isinstance(self.options.mesh, DeviceMesh):
            return bind(program, self.device_mesh)
        origin = (0,) * program.mesh.ndim
        module, axes = bind_graph(program.local(origin), {})
        add_size_inputs(module, program.sizes)
        return BoundProgram(program, self.device_mesh, origin, torch.device("cpu"), lambda: module, axes, ())

    def _dump(self, graph: PlanningGraph) -> Dump:
        """The dump folder of this graph, with the graph written to it, on the lowest rank of the mesh; False on the others."""
        folder = leader_folder(self.options.dump, self.device_mesh, f"graph_{graph.hash[:12]}")
        if not folder:
            return folder
        make_folder(folder)
        (folder / "traced.txt").write_text(f"{graph.module.graph}\n")
        return folder

    def _log(self, level: int, text: str, *args: Any) -> None:
        announce(self.device_mesh, level, text, *args)

    def _compare(self, fields: Mapping[str, str]) -> None:
        compare(fields, ranks=mesh_ranks(self.device_mesh), timeout=self.options.timeout)


def _fields(graph: PlanningGraph, named: NamedTensors, options: BackendOptions) -> dict[str, str]:
    """The fields that must be equal on all ranks before the first collective."""
    fields = {**versions(), **option_fields(options), "graph": graph.hash, **rule_fields(), **debug_field(options.debug)}
    if isinstance(options.mesh, DeviceMesh):
        fields |= mesh_fields(options.mesh)
    for end in graph.inputs:
        value = named.get(end.name)
        if value is None:
            continue
        check_has_data(end.kind, end.name, value)
        if end.kind == "input":
            fields |= shape_fields({end.name: value})
        if value.grad_fn is None:
            fields |= value_field(end.name, value) if end.kind == "input" else weight_fields({end.name: value})
    return fields
