"""The backend of ``torch.compile``: each graph that Dynamo captures is planned, sharded and compiled.

    torch.compile(model, backend="fxshard", options={"mesh": device_mesh})

Every rank of the mesh runs this with the same model and inputs. Parameters stay as they are: plain ones whole on each
rank, with whole gradients (the computation is sharded, memory is not saved); DTensors in their layouts, with gradients
that are DTensors. Plain inputs are global values, the same on each rank, and plain outputs are whole. Where Dynamo
predicts a DTensor as output, it is one, in a layout that the planner chooses.

A graph is planned when it is first called. Shapes are static in a plan: a graph that Dynamo captured for any size
(``dynamic=None`` does so at the second size) is planned once for each set of sizes and numbers that it is called with,
with a log line. ``dynamic=False`` leaves that to Dynamo, with its own limit on recompiles.

What stays Dynamo's affair, before this backend sees a graph:

- With DTensor parameters or inputs, Dynamo runs DTensor's own propagation first, and what DTensor lacks fails there.
  Plain tensors beside DTensors (rotary tables from ``torch.arange``, plain inputs and buffers) need
  ``torch.distributed.tensor.experimental.implicit_replication()``; scaled_dot_product_attention on the CPU needs
  ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. Both concern that propagation only, what runs is fxshard's plan:
  within both a Llama with DTensor parameters is one graph. A batch that the mesh does not divide fails where dims are
  flattened, as does any operator without a DTensor strategy; ``fxshard.parallelize`` does not have that limit.
- Calls on a DTensor that are about its shards (``to_local``, ``redistribute``, ...) inside a compiled graph are refused.

Without the option ``mesh`` a call goes to the mesh of the DTensors in its graph, else to that of ``with device_mesh:`` around it, else
to the default process group as one axis. Outputs that are views of an input, or of another output, are views; what is otherwise
honoured and refused: docs/torch-compile.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat import mesh_of_one
from fxshard.errors import OptionError
from fxshard.files import make_folder
from fxshard.passes.pipeline import lower_plan, plan_graph
from fxshard.passes.runner import Dump
from fxshard.planning_graph import PlanningGraph
from fxshard.program import ShardedProgram
from fxshard.runtime.bind import BoundProgram, bind, bind_graph, mesh_device
from fxshard.runtime.compile import CompiledProgram, compile_program, plain_arithmetic
from fxshard.runtime.dynamo_graph import DynamoGraph, autocast_on_cpu, read_graph, specialised, trace_graph
from fxshard.runtime.fields import debug_field, mesh_fields, rule_fields, shape_fields, value_field, weight_fields
from fxshard.runtime.foreign_plan import traced_for
from fxshard.runtime.graph_outputs import Output
from fxshard.runtime.graph_runner import GraphRunner
from fxshard.runtime.inputs import check_whole
from fxshard.runtime.launch import announce, compare, folder_of_one, mesh_ranks, share_plan, versions
from fxshard.runtime.mesh_of_call import ambient_mesh, mesh_of_dtensors, surroundings
from fxshard.runtime.options import BackendOptions, read_options
from fxshard.runtime.values import check_memory
from fxshard.runtime.wishes import Held, check_held, request_of
from fxshard.sharding_plan import ShardingPlan

MANY = 8
"""Programs of one graph from which on the user is warned."""


def fxshard(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; ``torch.compile`` calls this. ``options`` are the fields of ``BackendOptions``.

    What is returned plans at its first call, so that errors reach the user as they are:

    Raises:
        OptionError: an unknown option, or a bad value. TraceError: a graph that cannot be planned. ConstraintError,
        LayoutError: pins or layouts that cannot hold. PlanError: a plan for another graph, a DTensor on another mesh.
        RunError: ranks disagree (then see ``fxshard.local_batch``), or one is missing.
    """
    graph = read_graph(module, example_inputs)
    given = {**(options or {}), "mode": mode} if mode is not None else options
    if given is not None and given.get("mesh") is not None:
        return GraphPrograms(graph, given, others)
    return MeshPrograms(graph, given, others)


class MeshPrograms:
    """The programs of one Dynamo graph that no mesh was named for: those of each mesh that it is called on."""

    def __init__(self, graph: DynamoGraph, given: Mapping[str, Any] | None, others: Mapping[str, Any]) -> None:
        self.graph, self.given, self.others = graph, dict(given or {}), others
        self.by_place: dict[Any, GraphPrograms] = {}
        self.of_dtensors: GraphPrograms | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.of_dtensors is not None:  # Dynamo guards the meshes of DTensors: later calls have the same
            return self.of_dtensors(*args)
        place = surroundings()
        programs = self.by_place.get(place)
        if programs is None:
            mesh = mesh_of_dtensors(self.graph.names, args)
            programs = GraphPrograms(self.graph, {**self.given, "mesh": mesh or ambient_mesh(args)}, self.others)
            if mesh is not None:
                self.of_dtensors = programs
            else:
                self.by_place[place] = programs
        return programs(*args)


class GraphPrograms:
    """The programs of one Dynamo graph: one, or one for each set of sizes and numbers that it is called with."""

    def __init__(self, graph: DynamoGraph, given: Mapping[str, Any] | None, others: Mapping[str, Any]) -> None:
        self.graph, self.given, self.others = graph, given, dict(others)
        self.programs: dict[Any, GraphRunner] = {}
        self.places, self.symbolic = graph.tensor_places, graph.symbolic

    def __call__(self, *args: Any) -> Sequence[Any]:
        key = self._key(args) if self.symbolic else ()
        runner = self.programs.get(key)
        if runner is None:
            runner = self.programs[key] = self._make(args)
            if len(self.programs) == MANY:
                self._say(
                    logging.WARNING, "one graph was planned for %d sets of sizes and numbers, each for itself: %s", MANY, self._changing()
                )
        return runner([args[i] for i in self.places] if self.symbolic else args)

    @cached_property
    def options(self) -> BackendOptions:
        if self.others:
            what = f"the backend fxshard takes no {next(iter(self.others))!r}"
            raise OptionError(what, remedy="pass options={...} or mode=... to torch.compile, nothing else")
        return read_options(self.given)

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        mesh = self.options.mesh
        return mesh if isinstance(mesh, DeviceMesh) else mesh_of_one(mesh.axis_names)

    def _key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """What a program is made for: shapes (Dynamo guards the rest) and numbers (a float may come as a tensor)."""
        ends = zip(self.graph.kinds, args, strict=True)
        return tuple(x.shape if kind != "scalar" else x.item() if isinstance(x, torch.Tensor) else x for kind, x in ends)

    def _changing(self) -> str:
        columns = zip(self.graph.names, *self.programs, strict=True)
        return ", ".join(name for name, *values in columns if len(set(values)) > 1)

    def _make(self, args: Sequence[Any]) -> GraphRunner:
        """Plans, lowers and compiles for one set of sizes; every rank comes here with the same."""
        device = mesh_device(self.device_mesh).type
        with autocast_on_cpu(device):
            module, tensors, outputs = specialised(self.graph, args, views=self.options.plan is None)
            graph, names = self._trace(module, tensors)
        held = dict(zip(names, tensors, strict=True))
        with plain_arithmetic(device):
            compiled = self._compile(graph, held, outputs)
        return GraphRunner(compiled, held, outputs, self.graph.distributed, self.options.timeout)

    def _compile(self, graph: PlanningGraph, held: Held, outputs: Sequence[Output]) -> CompiledProgram:
        options, dump = self.options, self._dump(graph)
        self._compare(_fields(graph, held, options))
        distributed = [d for d, o in zip(self.graph.distributed, outputs, strict=True) if o.computed]
        plan = self._plan(graph, held, distributed, dump)
        program = lower_plan(graph, plan, dump, options.rng, options.without)
        check_held(program, held, options)
        check_whole(program, held, distributed)
        self._compare({"plan": plan.hash, "program": program.hash})
        kind = "training" if graph.train else "inference"
        text = "%s graph of %d nodes on %s, number of collectives: %d"
        self._say(logging.INFO, text, kind, len(graph.by_name), program.mesh, len(program.collectives))
        compiled = compile_program(self._bind(program), options.compiler, dump, options.timeout, options.debug, options.mode)
        self._compare({})  # all have compiled: none waits in a collective for one that still does
        return compiled

    def _trace(self, module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> tuple[PlanningGraph, list[str]]:
        """The planning graph and the names of ``tensors`` in it, those of the user's plan where it is for this graph."""
        if self.options.plan is not None:
            found = traced_for(self.options.plan, self.graph, module, tensors)
            if found is not None:
                return found
        names = [self.graph.names[i] for i in self.places]
        return trace_graph(module, tensors, names, [self.graph.kinds[i] for i in self.places]), names

    def _plan(self, graph: PlanningGraph, held: Held, distributed: Sequence[bool], dump: Dump) -> ShardingPlan:
        options = self.options
        if options.plan is not None and self._is_for(options.plan, graph):
            return options.plan
        if self.programs or options.plan is not None:
            shapes = ", ".join(f"{i.name} {tuple(held[i.name].shape)}" for i in graph.inputs_of("input"))
            self._say(logging.INFO, "planning again for %s: %s", "training" if graph.train else "inference", shapes)
        request = request_of(graph, held, distributed, options, self.graph.part)
        make = lambda: plan_graph(graph, options.planning_mesh, request, dump)  # noqa: E731
        return share_plan(make, ranks=mesh_ranks(self.device_mesh), timeout=options.timeout, key=graph.hash)

    def _is_for(self, plan: ShardingPlan, graph: PlanningGraph) -> bool:
        """Whether to take the user's plan: for its own graph, and for one that it ought to fit, which then is an error."""
        other = self.programs or self.graph.part or plan.train != graph.train
        return plan.graph_hash == graph.hash or not other

    def _bind(self, program: ShardedProgram) -> BoundProgram:
        if isinstance(self.options.mesh, DeviceMesh):
            return bind(program, self.device_mesh)
        origin = (0,) * program.mesh.ndim
        module, axes = bind_graph(program.local(origin), {})
        return BoundProgram(program, self.device_mesh, origin, torch.device("cpu"), module, axes, ())

    def _dump(self, graph: PlanningGraph) -> Dump:
        """A folder for this graph among others, the graph written to it; on the lowest rank of the mesh, False on the others."""
        folder = folder_of_one(self.options.dump, self.device_mesh, f"graph_{graph.hash[:12]}")
        if not folder:
            return folder
        make_folder(folder)
        (folder / "traced.txt").write_text(f"{graph.module.graph}\n")
        return folder

    def _say(self, level: int, text: str, *args: Any) -> None:
        announce(self.device_mesh, level, text, *args)

    def _compare(self, fields: Mapping[str, str]) -> None:
        compare(fields, ranks=mesh_ranks(self.device_mesh), timeout=self.options.timeout)


def _fields(graph: PlanningGraph, held: Held, options: BackendOptions) -> dict[str, str]:
    """What all ranks must have in common before the first collective."""
    fields = {**versions(), "graph": graph.hash, **rule_fields(), **debug_field(options.debug)}
    if isinstance(options.mesh, DeviceMesh):
        fields |= mesh_fields(options.mesh)
    for end in graph.inputs:
        value = held.get(end.name)
        if value is None:
            continue
        check_memory(end.kind, end.name, value)
        if end.kind == "input":
            fields |= shape_fields({end.name: value})
        if value.grad_fn is None:
            fields |= value_field(end.name, value) if end.kind == "input" else weight_fields({end.name: value})
    return fields
