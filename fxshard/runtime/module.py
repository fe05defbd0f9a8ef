"""parallelize: the same module, its parameters DTensors in the planned layouts, its forward the compiled sharded program.

Each way of calling it (train or not, shapes, dtypes, modes of its submodules) gets a program of its own, planned with the
parameters as they lie.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard._torch_compat import pytree
from fxshard._torch_compat.calls import graded
from fxshard.constraints import Constraint, check_constraints, names_in
from fxshard.errors import OptionError, PlanError, RuleError, RunError, StaticDimError, TraceError, a_kind, closest
from fxshard.hardware import Hardware
from fxshard.hardware_file import find_hardware
from fxshard.layout import Layout
from fxshard.mesh import Mesh, as_mesh
from fxshard.objects import leaves_in_objects, outputs_in_objects
from fxshard.ops.random import GENERATORS
from fxshard.passes.formulate import OBJECTIVES
from fxshard.passes.generator import check_generator
from fxshard.passes.mixed_precision import MixedPrecision, check_mixed_precision
from fxshard.passes.names import Names, by_end
from fxshard.passes.optimise import check_without
from fxshard.passes.pipeline import Request, lower_plan, plan_graph, trace_model
from fxshard.passes.runner import Dump
from fxshard.passes.trace import check_call
from fxshard.planning_graph import PlanningGraph
from fxshard.program import ShardedProgram
from fxshard.runtime.accumulation import Accumulation
from fxshard.runtime.agreement import TIMEOUT
from fxshard.runtime.any_size import Shapes, alike_key, changed_dims, refusal, shapes_of, uneven_sizes
from fxshard.runtime.attributes import AttributeReader, Attributes, differing
from fxshard.runtime.bind import bind, mesh_device
from fxshard.runtime.compile import COMPILERS, compile_program, plain_arithmetic
from fxshard.runtime.fields import debug_field, mesh_fields, rule_fields, shape_fields, weight_fields
from fxshard.runtime.inputs import check_whole, flatten_call, leaf_key, leaf_names
from fxshard.runtime.launch import announce, compare, folder_of_one, mesh_ranks, objection, share_plan, versions
from fxshard.runtime.options import (
    check_choice,
    check_device_mesh,
    check_flag,
    check_memory,
    check_number,
    check_pins,
    check_plan,
    check_source,
    check_unused,
)
from fxshard.runtime.parameters import held_parameters, planned_layouts, shard_parameters
from fxshard.runtime.runner import Runner
from fxshard.shapes import DynamicDim, dynamic_dims
from fxshard.sharding_plan import ShardingPlan

_KIND = {True: "training", False: "inference"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

RANKS = 16
"""Up to so many ranks a program for shards of unequal lengths is made, which has a graph for each."""

Planner = Callable[[PlanningGraph, Mesh, Request, Dump], ShardingPlan]


@dataclass(frozen=True)
class Settings:
    """How the programs of one module are planned and compiled; fields as in ``parallelize``."""

    hardware: str | Path | Hardware | None = None
    input_layouts: Any = None
    output_layouts: Any = None
    pins: Any = None
    memory_limit: float | str | None = None
    objective: str = "time"
    time_limit: float | None = None
    constraints: Sequence[Constraint] | None = None
    optimizer: Any = "none"
    compiler: str = "inductor"
    timeout: float = TIMEOUT
    debug: bool = False
    dump: str | Path | None = None
    cache: bool = True
    rng: str = GENERATORS[0]
    without: Sequence[str] = ()
    mixed_precision: MixedPrecision | None = None
    planner: Planner = plan_graph
    src_data_rank: int | Literal["same"] | None = "same"
    dynamic: bool | None = None
    dynamic_shapes: Any = None


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

    Parameters become DTensors in the planned layouts, cut from the full values that each rank holds (those on meta stay
    on meta); names in ``state_dict`` stay. Make the optimizer afterwards. Plain tensor arguments are global values, the
    same on each rank; outputs are DTensors if an argument was one, plain global tensors otherwise.

    Args:
        example_args: arguments of one call; meta or fake tensors will do. ``example_kwargs`` likewise.
        plan: a plan for these arguments; made by one rank for all if None.
        train: whether the first program is for training, by default as the plan, or True; others are made when they are
            called for.
        options: fields of ``Settings``: ``hardware`` (whose speeds the plan is made for; by default that of the mesh's
            device), ``input_layouts`` (plain inputs start replicated where it does not say
            otherwise), ``output_layouts`` (plain outputs return replicated, or as DTensors where a mapping gives one another layout
            by its name or a glob: ``"*.keys"``), ``pins``, ``memory_limit``,
            ``objective``, ``time_limit``, ``constraints``, ``optimizer``, ``compiler`` ("inductor" or "eager"),
            ``timeout`` (seconds to wait for other ranks, planning and in each collective), ``debug`` (whether ranks compare
            each collective before it is issued; docs/faults.md), ``dump``, ``cache`` (whether a plan made before is taken
            from disk), ``rng`` ("fxshard", whose random numbers do not depend on the mesh, or "torch", whose shards differ),
            ``without`` (names of passes after lowering to leave out; docs/after-lowering.md), ``mixed_precision`` (dtypes to
            compute and to reduce in, beside those of the parameters), ``planner``,
            ``src_data_rank`` (whose weights and buffers are the truth: that rank of the mesh, by its
            global number, sends the others what they need of its own; "same", the default: each rank cuts what it holds,
            and samples of it are compared first; None: the same, nothing compared or sent).

    Raises:
        OptionError: an unknown option. PlanError: a plan for another model, mode or mesh. RunError: ranks disagree, or
        one is missing. TraceError, ConstraintError, LayoutError: as ``fxshard.plan``.
    """
    check_call(model, example_args)
    check_device_mesh(device_mesh)
    settings = _settings(options)
    check_source(settings.src_data_rank, mesh_ranks(device_mesh))
    if plan is not None:
        check_plan(plan, device_mesh)
        decided = ("pins", "input_layouts", "output_layouts", "memory_limit", "objective", "constraints")
        check_unused(plan, **{name: getattr(settings, name) or None for name in decided})
    forward = ShardedForward(model, device_mesh, settings)
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    forward.prepare(args, kwargs, _mode(train, plan), plan)
    model.forward = forward
    return model


def _mode(train: bool | None, plan: ShardingPlan | None) -> bool:
    if plan is None:
        return True if train is None else train
    if train is not None and train != plan.train:
        what = f"the plan is for {_KIND[plan.train]}, train={train} asks for {_KIND[bool(train)]}"
        raise PlanError(what, remedy=f"plan with train={train}, or leave train out: the first program is then the plan's")
    return plan.train


def _settings(options: Mapping[str, Any]) -> Settings:
    known = list(Settings.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise OptionError(f"parallelize has no option {name!r}{closest(name, known)}", remedy=f"its options are {', '.join(known)}")
    settings = Settings(**options)
    check_choice("compiler", settings.compiler, COMPILERS)
    check_choice("objective", settings.objective, OBJECTIVES)
    check_generator(settings.rng)
    check_without(settings.without)
    check_number("timeout", settings.timeout, optional=False)
    check_memory(settings.memory_limit, settings.optimizer)
    check_number("time_limit", settings.time_limit)
    check_pins(settings.pins)
    check_constraints(settings.constraints)
    if settings.hardware is not None:
        find_hardware(settings.hardware)
    if not isinstance(settings.dump, str | Path | None):
        raise OptionError(f"dump is {a_kind(settings.dump)}", remedy="give a folder")
    check_flag("cache", settings.cache)
    check_flag("debug", settings.debug)
    if settings.dynamic is not None:
        check_flag("dynamic", settings.dynamic)
    if settings.dynamic is False and settings.dynamic_shapes is not None:
        raise OptionError("dynamic=False contradicts dynamic_shapes", remedy="leave one of them out")
    check_mixed_precision(settings.mixed_precision)
    if not callable(settings.planner):
        raise OptionError(f"the planner is {a_kind(settings.planner)}", remedy="leave it out, or give a function")
    return settings


@dataclass(frozen=True)
class Made:
    """A program that was made, and for what: the structure of the arguments, their shapes and the modules' attributes.

    ``unread``: (module, attribute) whose changes were found to leave its graph as it is; never ``training``, for which a
    program is looked up exactly.
    """

    spec: pytree.TreeSpec
    attributes: Attributes
    runner: Runner
    graph: PlanningGraph
    shapes: Shapes
    unread: set[tuple[int, str]] = field(default_factory=set)

    def serves(self, spec: pytree.TreeSpec, now: Attributes) -> bool:
        return self.spec == spec and differing(self.attributes, now) <= self.unread

    def also_for(self, now: Attributes) -> Made:
        """The same program for other attributes, its graph having been found to be the same."""
        self.unread.update((i, name) for i, name in differing(self.attributes, now) if name != "training")
        return replace(self, attributes=now)


@dataclass(eq=False)
class ShardedForward:
    """The ``forward`` of a parallelized module: finds or makes the program for a call and runs it."""

    model: nn.Module
    device_mesh: DeviceMesh
    settings: Settings
    runners: dict[Any, list[Made]] = field(default_factory=dict)
    alike: dict[Any, list[Made]] = field(default_factory=dict)
    """By what calls have in common whose sizes differ."""

    def __post_init__(self) -> None:
        self.mesh = as_mesh(self.device_mesh, self.settings.hardware)
        self.device = mesh_device(self.device_mesh)
        self.attributes = AttributeReader(self.model)
        self.places = [(owner, key) for owner, key, _ in held_parameters(self.model)]
        self.replaced = vars(self.model).get("forward")
        self.__signature__ = inspect.signature(self.model.forward)
        self.accumulation = Accumulation(self.places, self.settings.compiler, self.settings.rng, self.settings.debug)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten_call(args, kwargs)
        trained = graded(self.places)
        train = torch.is_grad_enabled() and (True in trained or any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves))
        now = self.attributes.now()
        key = self._key(leaves, trained if train else None)
        for made in self.runners.get(key, ()):
            if made.serves(spec, now):
                break
        else:
            made = self._of_any_size(key, leaves, spec, now) or self.prepare(args, kwargs, train)
        if train and self.accumulation.defers():
            return self.accumulation.runner(made.runner, made.graph)(leaves)
        return made.runner(leaves)

    def _of_any_size(self, key: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, now: Attributes) -> Made | None:
        """A program with dynamic sizes that serves those of ``leaves``; found at once from then on."""
        for made in self.alike.get(alike_key(key), ()):
            if made.serves(spec, now) and made.runner.program.sizes and self._refusal(made, leaves) is None:
                self.runners.setdefault(key, []).append(made)
                return made
        return None

    def _refusal(self, made: Made, leaves: Sequence[Any]) -> str | None:
        """As ``refusal``; ranks that have graphs of their own take different things for granted, and agree."""
        mine = refusal(made.runner, made.shapes, leaves)
        if not made.runner.program.by_rank:
            return mine
        return objection(mine, ranks=mesh_ranks(self.device_mesh), timeout=self.settings.timeout)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, plan: ShardingPlan | None = None) -> Made:
        """Plans, shards what is not sharded yet, compiles; the program serves all calls like this one, of the same shapes on all ranks."""
        first = not self.runners
        weights = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        alike = versions() if first else {}
        if first and self.settings.src_data_rank == "same":
            alike |= weight_fields(weights)
        ran = mesh_fields(self.device_mesh) | debug_field(self.settings.debug)
        names = leaf_names(args, kwargs)
        leaves, spec = flatten_call(args, kwargs)
        named = dict(zip(names, leaves, strict=True))
        shapes = shape_fields({n: x for n, x in named.items() if isinstance(x, torch.Tensor)})
        self._compare({**alike, **ran, **rule_fields(), **shapes})
        dump = self._dump(train)
        key, attributes = self._key(leaves, graded(self.places) if train else None), self.attributes.now()
        dims = self._dynamic_dims(key, named, spec, args, kwargs)
        with self.original(), torch.set_grad_enabled(train):
            graph = self._trace(args, kwargs, train, dims, dump)
        for made in self.runners.get(key, ()):
            if made.spec == spec and made.runner.program.plan.graph_hash == graph.hash and made.runner.program.out_spec == graph.out_spec:
                self.runners[key].append(made.also_for(attributes))
                return made
        if not first:
            others = f", and any other sizes of {'; '.join(map(str, dims))}" if dims else ""
            announce(self.device_mesh, logging.WARNING, "planning again for %s: %s%s", _KIND[train], _shapes(names, leaves), others)
        with plain_arithmetic(self.device.type):
            if plan is None:
                plan = self._plan(graph, named, first, dump)
            program = self._lower(graph, plan, dump)
            cut = self._cut(graph)
            check_whole(program, named, cut=cut)
            if first:
                source = self.settings.src_data_rank
                shard_parameters(self.model, planned_layouts(program), self.device_mesh, self.device, None if source == "same" else source)
            self._check_parameters(program)
            bound, s = bind(program, self.device_mesh, self.device), self.settings
            compiled = compile_program(bound, s.compiler, dump, s.timeout, s.debug)
        runner = Runner(self.model, compiled, names, self.settings.timeout, cut)
        made = Made(spec, attributes, runner, graph, shapes_of(leaves))
        self.runners.setdefault(key, []).append(made)
        self.alike.setdefault(alike_key(key), []).append(made)
        return made

    def _dynamic_dims(
        self, key: Any, named: Mapping[str, Any], spec: pytree.TreeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[DynamicDim, ...]:
        """Those that the user asked for, and those of which programs for calls like this one have another size."""
        if self.settings.dynamic is False:
            return ()
        with self.original():
            asked = dynamic_dims(self.model, args, kwargs, self.settings.dynamic_shapes)
        others = [made for made in self.alike.get(alike_key(key), ()) if made.spec == spec]
        uneven = {name for made in others for name in uneven_sizes(made.runner, list(named.values()))}
        if any(one.uneven for made in others for one in made.runner.program.sizes) or (self.mesh.size > RANKS and uneven):
            return ()
        if uneven:
            text = "%s is no multiple of what cuts it: a program for shards of unequal lengths"
            announce(self.device_mesh, logging.WARNING, text, ", ".join(sorted(uneven)))
        seen = [made.shapes for made in others]
        dims = changed_dims(named, asked, seen, everything=self.settings.dynamic is True)
        return tuple(replace(dim, uneven=dim.name in uneven, asked=dim.asked and not others) for dim in dims)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, dims: tuple[DynamicDim, ...], dump: Dump) -> PlanningGraph:
        """The graph; dims that are dynamic by themselves stay static where the model does not let them change, which is said."""
        while True:
            try:
                return trace_model(self._traced(args, kwargs, train, dims), self.mesh, dump)
            except (TraceError, RuleError) as error:
                named = error.dim if isinstance(error, StaticDimError) else None
                if not dims or any(dim.asked and named in (None, dim.name) for dim in dims):
                    raise
                if self.settings.dynamic is None:
                    announce(self.device_mesh, logging.WARNING, "sizes stay static: %s", error.what)
                dims = tuple(dim for dim in dims if named is not None and dim.name != named)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, dims: tuple[DynamicDim, ...]) -> Request:
        return Request(self.model, args, kwargs, train, mixed_precision=self.settings.mixed_precision, dynamic=dims)

    def _dump(self, train: bool) -> Dump:
        """A folder for the next program among those of this module, on the lowest rank of the mesh; False on the others."""
        return folder_of_one(self.settings.dump, self.device_mesh, f"{len(self.programs):02d}_{'train' if train else 'eval'}")

    def _plan(self, graph: PlanningGraph, leaves: Mapping[str, Any], first: bool, dump: Dump) -> ShardingPlan:
        s = self.settings
        request = Request(
            train=graph.train,
            input_layouts=self._input_layouts(graph, leaves),
            output_layouts=self._output_layouts(graph, leaves),
            pins=self._pins(graph, first),
            memory_limit=s.memory_limit,
            objective=s.objective,
            time_limit=s.time_limit,
            constraints=self._constraints(graph, first),
            optimizer=s.optimizer,
            cache=s.cache,
        )
        make = lambda: s.planner(graph, self.mesh, request, dump)  # noqa: E731
        return share_plan(make, ranks=mesh_ranks(self.device_mesh), timeout=s.timeout, key=graph.hash)

    def _lower(self, graph: PlanningGraph, plan: ShardingPlan, dump: Dump) -> ShardedProgram:
        check_plan(plan, self.mesh)
        program = lower_plan(graph, plan, dump, self.settings.rng, self.settings.without)
        self._compare({"graph": graph.hash, "plan": plan.hash, "program": program.hash})
        text = "%s program on %s, number of collectives: %d"
        announce(self.device_mesh, logging.INFO, text, _KIND[graph.train], self.mesh, len(program.collectives))
        return program

    def _compare(self, fields: Mapping[str, str]) -> None:
        compare(fields, ranks=mesh_ranks(self.device_mesh), timeout=self.settings.timeout)

    def _check_parameters(self, program: ShardedProgram) -> None:
        """The parameters lie as the program reads them."""
        layouts = planned_layouts(program)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            layout = layouts.get(name)
            if layout is not None and (not isinstance(parameter, DTensor) or tuple(parameter.placements) != tuple(layout)):
                have = Layout(parameter.placements) if isinstance(parameter, DTensor) else "a plain tensor"
                raise PlanError(f"parameter {name} is {have}, the plan reads it in {layout}", remedy="plan with the parameters as they are")

    def _input_layouts(self, graph: PlanningGraph, leaves: Mapping[str, Any]) -> Any:
        """Plain inputs replicated and DTensors as they are, where the user does not say otherwise."""
        given = self._given(self.settings.input_layouts, graph, "input")
        if given is not None and not isinstance(given, Mapping):
            return given
        whole = Layout.replicated(self.mesh.ndim)
        known = {i.name: leaves[i.name] for i in graph.inputs_of("input")}
        default = {n: Layout(x.placements) if isinstance(x, DTensor) else whole for n, x in known.items()}
        return {**default, **(given or {})}

    def _output_layouts(self, graph: PlanningGraph, leaves: Mapping[str, Any]) -> Any:
        """Plain outputs replicated where the user does not say otherwise; DTensors as the planner likes, but for one in an object that
        takes the place of another: it lies as that one."""
        given = self._given(self.settings.output_layouts, graph, "output")
        if given is not None and not isinstance(given, Mapping):
            return given
        inside = {name for i, name in enumerate(leaves) if i in leaves_in_objects(graph.in_spec)}
        distributed = any(isinstance(x, DTensor) for name, x in leaves.items() if name not in inside)
        default: dict[str, Any] = {}
        if not distributed:
            default = {o.name: Layout.replicated(self.mesh.ndim) for o in graph.outputs if o.kind == "output"}
        for name, path in outputs_in_objects(graph.out_spec).items():
            if isinstance(before := leaves.get(path), DTensor):
                default[name] = Layout(before.placements)
        return {**default, **(given or {})} or None

    def _cut(self, graph: PlanningGraph) -> frozenset[str]:
        """The outputs whose layouts the user asked for, one by one."""
        given = self._given(self.settings.output_layouts, graph, "output")
        return frozenset(given) if isinstance(given, Mapping) else frozenset()

    def _given(self, layouts: Any, graph: PlanningGraph, kind: str) -> Any:
        """The user's layouts by the names of this graph; of a later program those that mean something in it."""
        if not isinstance(layouts, Mapping) or set(layouts) <= set(self.mesh.axis_names):
            return layouts
        known = {i.name for i in graph.inputs} | {o.name for o in graph.outputs if o.kind == "output"}
        return {n: layout for n, layout in by_end(layouts, graph, kind).items() if not self.runners or n in known}

    def _pins(self, graph: PlanningGraph, first: bool) -> Any:
        """The user's pins, DTensor parameters as they lie, buffers replicated; after the first program the parameters'
        layouts are settled, and of the user's pins those stay that mean something in this graph."""
        given = self.settings.pins
        whole = Layout.replicated(self.mesh.ndim)
        known = {i.name for i in graph.inputs} | set(graph.aliases)
        own: dict[str, Any] = {i.name: whole for i in graph.inputs_of("buffer")}
        parameters = {n: p for n, p in self.model.named_parameters(remove_duplicate=False) if n in known}
        own.update({n: Layout(p.placements) for n, p in parameters.items() if isinstance(p, DTensor)})
        if first:
            return given if isinstance(given, ShardingPlan) else {**own, **(given or {})}
        kept = {} if given is None or isinstance(given, ShardingPlan) else given
        others = [i.name for i in graph.inputs if i.kind != "parameter"] + [o.name for o in graph.outputs if o.kind == "output"]
        others += [*graph.returned, *(n.name for n in graph.nodes if n.op == "call_function")]
        return {**{k: v for k, v in kept.items() if k not in parameters and any(fnmatch.fnmatchcase(n, k) for n in others)}, **own}

    def _constraints(self, graph: PlanningGraph, first: bool) -> tuple[Constraint, ...]:
        """The user's; after the first program those whose names mean something in this graph."""
        given = check_constraints(self.settings.constraints)
        names = Names(graph)
        return given if first else tuple(c for c in given if all(map(names.means_something, names_in(c))))

    @property
    def programs(self) -> tuple[ShardedProgram, ...]:
        """The programs made so far, those of one way of calling together."""
        runners = dict.fromkeys(made.runner for found in self.runners.values() for made in found)
        return tuple(runner.program for runner in runners)

    def _key(self, leaves: Sequence[Any], trained: tuple[bool, ...] | None) -> tuple[Any, ...]:
        """``trained``: for each parameter whether it requires a gradient; None for inference."""
        return trained, _autocast(self.device.type), tuple(map(leaf_key, leaves))

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """The module with the forward that it had before, and without its hooks: those run around the sharded forward."""
        state = vars(self.model)
        kept = {name: state[name] for name in ("forward", *_HOOKS) if name in state}
        state.update({name: type(state[name])() for name in _HOOKS if name in state})
        state.pop("forward", None)
        if self.replaced is not None:
            state["forward"] = self.replaced
        try:
            yield
        finally:
            state.pop("forward", None)
            state.update(kept)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        what = "the module is parallelized already, so that it cannot be copied, planned or parallelized again"
        raise RunError(
            what, remedy="plan and copy the model before parallelize; for other options build it anew and move weights by state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError("a parallelized module cannot be pickled", remedy="save it by fxshard.save_checkpoint")


def _autocast(device_type: str) -> Any:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _shapes(names: Sequence[str], leaves: Sequence[Any]) -> str:
    return ", ".join(f"{n} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{n}={x!r}" for n, x in zip(names, leaves, strict=True))
