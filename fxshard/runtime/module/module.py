"""parallelize: turns the parameters of a module into DTensors in the planned layouts, and its forward into compiled sharded programs.

Each kind of call (training or not, shapes, dtypes, modes of its submodules) gets a program of its own. Later programs are planned with
the parameters' current layouts.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard._torch_compat import pytree
from fxshard._torch_compat.dynamo.hooks import without_global_hooks
from fxshard.collecting import few_collections
from fxshard.errors import RunError, SizesError
from fxshard.graph.objects import Counted
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.mesh.mesh import as_mesh
from fxshard.passes.annotation.annotate import probes
from fxshard.passes.pipeline import Request, lower_plan, plan_graph, trace_model
from fxshard.passes.runner import Dump, timed
from fxshard.passes.trace.fakes.rebind import rebound
from fxshard.passes.trace.named_layouts import LocalInputsError
from fxshard.passes.trace.trace import check_call
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.calls.after_run import after_run_of
from fxshard.runtime.calls.attributes import AttributeHistory, AttributeReader, Attributes, attributes_text
from fxshard.runtime.calls.counts import new_counters, warn_of_counts
from fxshard.runtime.calls.dynamic_sizes import (
    UNEVEN_SIZES,
    Shapes,
    agreed_refusal,
    dims_changed_by_call,
    dynamic_dims_of_call,
    fallback_dims,
    moved_names,
    refusal,
    refusal_message,
    replan_message,
    shapes_of,
    size_free_key,
    trace_with_static_fallback,
)
from fxshard.runtime.calls.entries import entries, entry_settings
from fxshard.runtime.calls.inputs import check_plain_results, flatten_call, leaf_key, other_calls_text, shapes_text
from fxshard.runtime.calls.options import check_device_mesh, check_plan, check_source, check_unused, option_fields, read_options
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.calls.settings import Settings
from fxshard.runtime.calls.waiting import dissolve, open_in, with_parts
from fxshard.runtime.compile.compile import compile_program
from fxshard.runtime.compile.compiled import without_autocast
from fxshard.runtime.compile.compiler_check import start_compiler_check
from fxshard.runtime.module.accumulation import Accumulation
from fxshard.runtime.module.call import Call, opened
from fxshard.runtime.module.fully_sharded import fully_sharded_parameters, without_fully_shard
from fxshard.runtime.module.loading import accept_full_values
from fxshard.runtime.module.module_program import ModuleProgram
from fxshard.runtime.module.module_state import Hooks, ModuleSnapshot, ModuleState, hook_fields, original_forward, same_hooks
from fxshard.runtime.module.parameters import check_gradient_hooks, check_parameters, drop_gradients, shard_for_program
from fxshard.runtime.module.plan_requests import MODE_NAMES, PlanRequests, mode_of
from fxshard.runtime.module.refusals import COMPILED, check_surroundings, refuse_code, refuse_pickle, refuse_shared_memory
from fxshard.runtime.module.replan_reasons import hooks_text, trainable_text
from fxshard.runtime.module.several_sizes import sampled_sizes, unused_sizes_text, warn_beyond_limit
from fxshard.runtime.module.shard_arguments import ShardArguments
from fxshard.runtime.optim.moved_states import states_follow
from fxshard.runtime.rank_graph.bind import bind, mesh_device
from fxshard.runtime.ranks.compared_fields import Fields, debug_field, mesh_fields, rule_fields, shape_fields, weight_fields
from fxshard.runtime.ranks.launch import (
    announce,
    compare,
    fails_together,
    leader_folder,
    leads,
    mesh_ranks,
    objection,
    share_plan,
    versions,
)
from fxshard.shapes import DynamicDim, WeightedSizes, dynamic_dims, weighted_sizes


def parallelize(
    model: nn.Module,
    example_args: Sequence[Any],
    device_mesh: DeviceMesh,
    plan: ShardingPlan | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    train: bool | None = None,
    **options: Any,
) -> nn.Module:
    """Shards ``model`` over ``device_mesh`` in place and returns it; every rank of the mesh calls this.

    Parameters become DTensors in the planned layouts, shards of the full values that each rank holds (those on meta stay on meta);
    names in ``state_dict`` stay. Create the optimizer afterwards. Parameters that are DTensors already stay the same objects, in their
    layouts; torch's ``fully_shard`` is taken off. Plain tensor arguments are global values, equal on all ranks. Outputs
    are DTensors if an argument is one, plain global tensors otherwise.

    Args:
        example_args: arguments of one call; meta or fake tensors will do. ``example_kwargs`` likewise.
        plan: a plan for these arguments; if None, one rank makes it for all.
        train: whether the first program is for training; by default as the plan, or True. Other programs are made on demand.
        options: how to plan, ``hardware``, ``input_layouts``, ``output_layouts`` (a mapping from a name or a glob, ``"*.keys"``, to a
            layout makes that output a DTensor), ``pins``, ``parallel``, ``memory_limit``, ``objective``, ``time_limit``, ``constraints``,
            ``optimizer``, ``offload``, ``dynamic``, ``dynamic_shapes``, ``example_sizes``, ``planner``; and how to run, ``compiler``,
            ``timeout``, ``debug``, ``dump``, ``cache``, ``rng``, ``without``, ``mixed_precision``, ``src_data_rank``. ``Options`` and
            ``Settings`` in fxshard/runtime/calls say what each means.

    Raises:
        OptionError: an unknown option. PlanError: a plan for another model, mode or mesh. RunError: ranks disagree, or
        one is missing. TraceError, ConstraintError, LayoutError: as ``fxshard.plan``.
    """
    waiting = dissolve(model) if isinstance(model, nn.Module) else ()
    check_call(model, example_args, fsdp2=True)
    check_gradient_hooks(model)
    check_device_mesh(device_mesh)
    settings = with_parts(read_options(Settings, options, "parallelize"), as_mesh(device_mesh), waiting)
    return shard_module(model, device_mesh, settings, example_args, example_kwargs, train, plan, open_in(waiting))


def shard_module(
    model: nn.Module,
    device_mesh: DeviceMesh,
    settings: Settings,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    train: bool | None,
    plan: ShardingPlan | None = None,
    open_parameters: Sequence[nn.Parameter] = (),
) -> nn.Module:
    """``parallelize`` with checked arguments. ``open_parameters``: DTensors whose layouts the plan decides."""
    check_source(settings.src_data_rank, mesh_ranks(device_mesh))
    if plan is not None:
        check_plan(plan, device_mesh)
        decided = (
            "pins",
            "parallel",
            "input_layouts",
            "output_layouts",
            "memory_limit",
            "objective",
            "constraints",
            "example_sizes",
            "offload",
        )
        check_unused(plan, **{name: getattr(settings, name) or None for name in decided})
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    following = states_follow((*model.parameters(), *fully_sharded_parameters(model)))
    with following, without_fully_shard(model, device_mesh, settings.timeout):
        if settings.compiler == "inductor" and device_mesh.device_type == "cpu":
            with timed("ask the compiler"):
                start_compiler_check(settings.cache)
        forward = ShardedForward(model, device_mesh, settings, tuple(open_parameters))
        forward.prepare(args, kwargs, mode_of(train, plan), plan)
    accept_full_values(model)
    refuse_shared_memory()
    model.forward = forward
    for module in entries(model):
        module.forward = ShardedForward(module, device_mesh, entry_settings(settings), entry=True)
    return model


@dataclass(eq=False, repr=False)
class ShardedForward:
    """The ``forward`` of a parallelized module: finds or makes the program for a call and runs it. ``by_key``: programs by a call's key."""

    model: nn.Module
    device_mesh: DeviceMesh
    settings: Settings
    open_parameters: tuple[nn.Parameter, ...] = ()
    """DTensors whose layouts the first plan decides."""
    by_key: dict[Any, list[ModuleProgram]] = field(default_factory=dict)
    by_size_free_key: dict[Any, list[ModuleProgram]] = field(default_factory=dict)
    """The programs by ``size_free_key``: the candidates for calls of other sizes."""
    deferred: set[tuple[Runner, Shapes]] = field(default_factory=set)
    """Programs that leave gradients pending, with shapes that they are known to serve."""
    sampled: tuple[WeightedSizes, ...] = ()
    """The sizes for which the user wants plans to be optimised."""
    warned: set[Runner] = field(default_factory=set)
    """Programs of which the user was warned that a call exceeds the memory limit."""
    entry: bool = False
    """Whether the module is inside another one, which is sharded already and of which ``generate()`` calls it by itself."""

    def __post_init__(self) -> None:
        self.mesh = as_mesh(self.device_mesh, self.settings.hardware)
        self.shards = ShardArguments(self.device_mesh)
        self.requests = PlanRequests(self.model, self.settings, self.mesh, self.shards, frozenset(map(id, self.open_parameters)))
        self.device = mesh_device(self.device_mesh)
        self.replaced = vars(self.model).get("forward")
        self.__signature__ = inspect.signature(self.model.forward)
        self.sharded = self.entry
        self.warned_counts: set[str] = set()
        self.counted: Counted = frozenset()
        self.track_modules()

    def track_modules(self) -> None:
        """Starts tracking the state of the module's current submodules."""
        self.state = ModuleState(self.model, self.device_mesh)
        self.attributes, self.history = AttributeReader(self.model), AttributeHistory(type(self.model).__name__)
        s = self.settings
        self.accumulation = Accumulation(self.state.places, s.compiler, s.rng, s.debug, s.cache)

    @torch.compiler.disable(reason=COMPILED)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_surroundings()
        args, kwargs = self.shards.distributed(args, kwargs)
        leaves, spec = flatten_call(args, kwargs, self.counted)
        if not self.state.same_structure():
            self._refresh()
        snapshot = self.state.snapshot()
        train = torch.is_grad_enabled() and (
            True in snapshot.trainable or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        )
        now, hooks = self.attributes.current(), self.state.hooks()
        key = self._key(leaves, snapshot, train)
        for made in self.by_key.get(key, ()):
            if made.serves(spec, now, hooks):
                break
        else:
            made = self._find_dynamic(key, leaves, spec, now, hooks) or self.prepare(args, kwargs, train)
            leaves, _ = flatten_call(*self.shards.distributed(args, kwargs), self.counted)
        if not (train and self.accumulation.defers()):
            return made.after.run(made.runner, leaves)
        runner, shapes = self.accumulation.runner(made.runner, made.graph), shapes_of(leaves)
        if runner.program.sizes and (runner, shapes) not in self.deferred:
            mine = refusal(runner, made.shapes, leaves)  # its layouts may need other sizes than those of the reducing program
            if objection(mine, ranks=mesh_ranks(self.device_mesh), timeout=self.settings.timeout) is not None:
                made = self.prepare(args, kwargs, train, dims=())
                self.by_key[key].insert(0, made)
                runner = self.accumulation.runner(made.runner, made.graph)
            self.deferred.add((runner, shapes))
        return made.after.run(runner, leaves)

    def _refresh(self) -> None:
        """Drops all programs, after modules or parameters were added, replaced or removed."""
        self.by_key.clear()
        self.by_size_free_key.clear()
        self.track_modules()
        accept_full_values(self.model)

    def _find_dynamic(self, key: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, now: Attributes, hooks: Hooks) -> ModuleProgram | None:
        """A program with dynamic sizes that serves the call, if there is one; later calls of these shapes find it by their key."""
        for made in self.by_size_free_key.get(size_free_key(key), ()):
            if made.serves(spec, now, hooks) and made.runner.program.sizes and self._refusal(made, leaves) is None:
                self.by_key.setdefault(key, []).append(made)
                if leads(self.device_mesh):
                    warn_beyond_limit(made, leaves, self.settings.optimizer, self.warned)
                return made
        return None

    def _refusal(self, made: ModuleProgram, leaves: Sequence[Any]) -> str | None:
        return agreed_refusal(made, leaves, self.device_mesh, self.settings.timeout)

    @fails_together
    @few_collections()
    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        train: bool,
        plan: ShardingPlan | None = None,
        dims: tuple[DynamicDim, ...] | None = None,
        retry: bool = False,
    ) -> ModuleProgram:
        """Makes a program for this call and registers it: traces, plans, shards parameters (the first time), lowers and compiles.

        ``dims``: the dynamic dims, by default chosen from the settings and the programs so far. ``retry``: whether a program was just
        planned for this call and does not serve it. Every rank calls this, with the same shapes.
        """
        first = not self.sharded
        call = opened(args, kwargs, self.counted, train, self.attributes.current(), self.state.hooks())
        self._compare(self._fields(call, first))
        dump = self._dump(train)
        key = None if first else self._key(call.leaves, self.state.snapshot(), train)
        others = [] if first else [made for made in self.by_size_free_key.get(size_free_key(key), ()) if made.spec == call.spec]
        alike = self.by_key.get(key, [])
        self.history.changed |= {a for made in alike for a in made.changed_attributes(call.attributes) if a[1] != "training"}
        grows = dims is None and not others and plan is None and self.settings.dynamic is not False
        try:
            graph = self._graph(call, self._dynamic_dims(call, others) if dims is None else dims, others, grows, dump)
        except LocalInputsError as found:
            if not self.shards.learn(found.layouts):
                raise
            return self.prepare(*self.shards.distributed(args, kwargs), train, plan)
        if graph is None:
            return self.prepare(args, kwargs, train)
        self.history.record(graph, call.attributes, plan)
        warn_of_counts(graph, self.warned_counts, self.device_mesh)
        after = after_run_of(self.model, graph, self.device)
        for made in alike:
            if made.spec == call.spec and made.has(graph):
                also = made.extended_to(call.attributes, call.hooks, after, graph, self.history.written | self.history.changed)
                alike.append(also)
                return also
        if not first:
            self._announce(call, graph, key, [*others, *alike][-1:], retry)
        named = {**call.named, **after.taps()}
        try:
            program = self._planned(call, graph, named, plan, first, dump)
        except SizesError as error:
            dims = () if graph.family is None else graph.family.dims
            if any(dim.required for dim in dims):
                raise
            announce(self.device_mesh, logging.WARNING, "no program can serve all these sizes: %s", error.what)
            return self.prepare(call.args, call.kwargs, train, None, fallback_dims(dims), retry=True)
        runner = self._compiled(program, graph, named, first, dump)
        key = self._key(call.leaves, self.state.snapshot(), train)
        made = ModuleProgram(call.spec, call.attributes, runner, graph, shapes_of(call.leaves), call.hooks, after)
        self.by_size_free_key.setdefault(size_free_key(key), []).append(made)
        if (reason := self._refusal(made, call.leaves)) is not None:  # it serves other calls, not the one that it was made for
            announce(self.device_mesh, *refusal_message(made, reason))
            return self.prepare(call.args, call.kwargs, train, retry=True)
        self.by_key.setdefault(key, []).append(made)
        return made

    def _fields(self, call: Call, first: bool) -> Fields:
        """What must be equal on all ranks before the program of ``call`` is made."""
        fields = {**versions(), **option_fields(self.settings)} if first else {}
        if first and self.settings.src_data_rank == "same":
            fields |= weight_fields({**dict(self.model.named_parameters()), **dict(self.model.named_buffers())})
        fields |= {**hook_fields(self.state), **mesh_fields(self.device_mesh), **debug_field(self.settings.debug)}
        return {**fields, **rule_fields(), **shape_fields(call.tensors)}

    def _graph(
        self, call: Call, dims: tuple[DynamicDim, ...], others: Sequence[ModuleProgram], grows: bool, dump: Dump
    ) -> PlanningGraph | None:
        """The traced graph of ``call``; if ``grows``, the dims that the call itself changes are dynamic too.

        None if tracing shows that numbers in the call's objects are counters: then it must be opened again.
        """
        with original_forward(self.model, self.replaced), torch.set_grad_enabled(call.train):
            moved = moved_names(dims, call.named, [made.shapes for made in others]) if self.settings.dynamic else None
            graph = self._trace(call, dims, dump, moved)
            if grows and (new := new_counters(graph, self.counted)):
                self.counted |= new
                return None
            if grows and (more := dims_changed_by_call(graph, call.named, dims)):
                graph = self._trace(call, (*dims, *more), dump, moved)
        return graph

    def _announce(self, call: Call, graph: PlanningGraph, key: Any, last: Sequence[ModuleProgram], retry: bool) -> None:
        """Logs that another program is planned, and why ``last``, the last one for such calls if any, does not serve this one."""
        changed = {a for made in last for a in made.changed_attributes(call.attributes) - made.unread if a[1] != "training"}
        why = attributes_text(self.model, changed, call.attributes) + "".join(hooks_text(self.state, made, call.hooks) for made in last)
        why += "" if last else trainable_text(self.state, self.state.snapshot(), key, self.by_key)
        text = shapes_text(call.named) + why + other_calls_text(() if graph.family is None else graph.family.dims, call.named)
        announce(self.device_mesh, *replan_message(retry), MODE_NAMES[call.train], text)

    def _planned(
        self, call: Call, graph: PlanningGraph, named: Mapping[str, Any], plan: ShardingPlan | None, first: bool, dump: Dump
    ) -> ShardedProgram:
        """The program of ``graph``, lowered by ``plan``, which is made if it is None. ``named``: the leaves of the call, and taps."""
        with without_autocast(self.device.type), without_global_hooks():
            if graph.family is not None:
                probes(graph.family, self.mesh)  # an error in planning would reach the other ranks without its reason
            verified = plan is None and self.settings.planner is plan_graph
            if plan is None:
                plan = self._plan(graph, named, first, dump, self._named_dims(call) if self.sampled else ())
            return self._lower(graph, plan, dump, verified)

    def _compiled(self, program: ShardedProgram, graph: PlanningGraph, named: Mapping[str, Any], first: bool, dump: Dump) -> Runner:
        """The runner of ``program``, compiled on first use; shards the parameters if it is the ``first``."""
        s, requested_outputs = self.settings, self.requests.requested_outputs(graph, first)
        with without_autocast(self.device.type), without_global_hooks():
            distributed, local = self.shards.results(graph, named)
            check_plain_results(program, named, distributed, requested_outputs)
            if first:
                source = None if s.src_data_rank == "same" else s.src_data_rank
                with timed("shard parameters"):
                    shard_for_program(self.model, program, self.device_mesh, self.device, source)
                self.sharded, self.open_parameters = True, ()
            check_parameters(self.model, program)
            bound = bind(program, self.device_mesh, self.device)
            compiled = compile_program(bound, s.compiler, dump, s.timeout, s.debug, s.cache, lazy=True)
        shown = self.requests.shown_placements(graph, named, first)
        return Runner(compiled, list(named), self.model, s.timeout, requested_outputs, local, distributed, shown)

    def _dynamic_dims(self, call: Call, others: Sequence[ModuleProgram]) -> tuple[DynamicDim, ...]:
        """The dims that the user asked for, and those in which this call differs from ``others``, programs for similar calls."""
        if self.settings.dynamic is False:
            return ()
        asked = self._named_dims(call)
        if self.sharded:
            asked = tuple(replace(dim, required=False) for dim in asked)  # only the first program has to be dynamic
        else:
            self.sampled = weighted_sizes(self.settings.example_sizes, asked)
        serving = [(made.runner, made.shapes) for made in others if made.serves(call.spec, call.attributes, call.hooks)]
        everything = self.settings.dynamic is True
        dims, uneven = dynamic_dims_of_call(call.named, asked, [made.shapes for made in others], serving, everything=everything)
        if uneven:
            announce(self.device_mesh, logging.INFO, UNEVEN_SIZES, ", ".join(uneven))
        return dims

    def _named_dims(self, call: Call) -> tuple[DynamicDim, ...]:
        """The dims of this call that the user named or marked."""
        with original_forward(self.model, self.replaced):
            return dynamic_dims(
                self.model, call.args, call.kwargs, self.settings.dynamic_shapes, call="later" if self.sharded else "example"
            )

    def _trace(self, call: Call, dims: tuple[DynamicDim, ...], dump: Dump, moved: Collection[str] | None) -> PlanningGraph:
        """The traced graph. Automatic dynamic dims that cannot change in the model become static, with a warning if in ``moved``."""
        asked = Request(
            self.model,
            call.args,
            call.kwargs,
            call.train,
            mixed_precision=self.settings.mixed_precision,
            observe=True,
            written=self.history.written | self.history.changed,
        )
        trace = lambda dims: trace_model(replace(asked, dynamic=dims), self.mesh, dump)  # noqa: E731
        return trace_with_static_fallback(trace, dims, self.device_mesh, moved)

    def _dump(self, train: bool) -> Dump:
        """The dump folder of this module's next program, on the lowest rank of the mesh; False on the others."""
        count = len({made.runner for found in self.by_size_free_key.values() for made in found})
        return leader_folder(self.settings.dump, self.device_mesh, f"{count:02d}_{'train' if train else 'eval'}")

    def _plan(self, graph: PlanningGraph, leaves: Mapping[str, Any], first: bool, dump: Dump, here: Sequence[DynamicDim]) -> ShardingPlan:
        s, sampled = self.settings, sampled_sizes(self.sampled, graph, here, first=first)
        if (unused := unused_sizes_text(self.sampled, graph, here)) is not None:
            announce(self.device_mesh, logging.WARNING, "the plan is not optimised for example_sizes at %s", unused)
        request = self.requests.request(graph, leaves, sampled, first=first)
        make = lambda: s.planner(graph, self.mesh, request, dump)  # noqa: E731
        with timed("plan, shared"):
            return share_plan(make, ranks=mesh_ranks(self.device_mesh), timeout=s.timeout, key=graph.hash)

    def _lower(self, graph: PlanningGraph, plan: ShardingPlan, dump: Dump, verified: bool) -> ShardedProgram:
        check_plan(plan, self.mesh)
        program = lower_plan(graph, plan, dump, self.settings.rng, self.settings.without, verified)
        self._compare({"graph": graph.hash, "plan": plan.hash, "program": program.hash})
        text = "%s program on %s, number of collectives: %d"
        announce(self.device_mesh, logging.INFO, text, MODE_NAMES[graph.train], self.mesh, len(program.collectives))
        return program

    def _compare(self, fields: Mapping[str, str]) -> None:
        with timed("compare ranks"):
            compare(fields, ranks=mesh_ranks(self.device_mesh), timeout=self.settings.timeout)

    def __repr__(self) -> str:
        return f"<sharded forward of {type(self.model).__name__} on {self.mesh}, programs made: {len(self.programs)}>"

    @property
    def programs(self) -> tuple[ShardedProgram, ...]:
        """The programs made so far, grouped by the key of the call."""
        runners = dict.fromkeys(made.runner for found in self.by_key.values() for made in found)
        return tuple(runner.program for runner in runners)

    def _key(self, leaves: Sequence[Any], snapshot: ModuleSnapshot, train: bool) -> tuple[Any, ...]:
        return snapshot.trainable if train else None, snapshot.layouts, _autocast(self.device.type), tuple(map(leaf_key, leaves))

    def __deepcopy__(self, memo: Any) -> ShardedForward:
        """The forward of a copy of the module, initialised on its first use, when the copy is complete."""
        if id(self.model) not in memo:
            raise RunError("the forward of a parallelized module cannot be copied by itself", remedy="copy.deepcopy the module")
        new = object.__new__(ShardedForward)
        replaced = rebound(copy.deepcopy(self.replaced, memo), memo, {})
        drop_gradients(self.model, memo)
        vars(new).update(device_mesh=self.device_mesh, settings=self.settings, entry=self.entry)
        vars(new).update(model=memo[id(self.model)], origin=(self, replaced))
        return new

    def __getattr__(self, name: str) -> Any:
        origin = vars(self).pop("origin", None)
        if origin is None:
            if name in ("__code__", "__globals__"):
                refuse_code(name)
            raise AttributeError(name)
        self._copy_programs(*origin)
        return getattr(self, name)

    def _copy_programs(self, origin: ShardedForward, replaced: Any) -> None:
        """Initialises this copy of ``origin`` with copies of its programs, which run the same compiled code."""
        self.by_key, self.by_size_free_key, self.deferred, self.warned, self.sampled = {}, {}, set(), set(), origin.sampled
        self.__post_init__()
        self.replaced, self.sharded, self.counted = replaced, True, origin.counted
        self.history = origin.history.copied()
        self.shards.layouts.update(origin.shards.layouts)
        hooks = self.state.hooks()
        every = {id(made): made for found in origin.by_key.values() for made in found}
        kept = {i: made.copied_to(self.model) for i, made in every.items() if same_hooks(made.hooks, hooks) or not made.hooks}
        for table, own in ((origin.by_key, self.by_key), (origin.by_size_free_key, self.by_size_free_key)):
            own.update({key: [kept[id(made)] for made in found if id(made) in kept] for key, found in table.items()})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()


def _autocast(device_type: str) -> Any:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
