"""ExportedProgram: a program with its weights, as ``fxshard.export`` makes it and ``fxshard.load`` reads it back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard import archive
from fxshard._torch_compat import pytree
from fxshard.archive.compiled import CompiledCode
from fxshard.archive.planning import Planning
from fxshard.archive.weights import select_weights
from fxshard.errors import FileError, FxshardError, OptionError, PlanError, RunError, SizesError
from fxshard.files import REMAKE
from fxshard.graph.objects import open_call
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.layout.layouts import Layout
from fxshard.mesh.hardware import Hardware
from fxshard.mesh.mesh import Mesh, as_mesh
from fxshard.passes.after_lowering.optimise import check_without
from fxshard.passes.annotation.verify import verify_graph
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.pipeline import LOWERING, Compilation, Request, lower_plan, make_plan, plan_graph, run
from fxshard.passes.runner import Dump
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.ahead.load_ahead import axes_of_code, load_program
from fxshard.runtime.calls.inputs import Leaves, leaf_names
from fxshard.runtime.calls.options import check_choice, check_device_mesh, check_flag, check_number, check_weights
from fxshard.runtime.calls.runner import Runner
from fxshard.runtime.compile.compile import COMPILERS, compile_program
from fxshard.runtime.compile.compiled import CompiledProgram
from fxshard.runtime.module.parameters import parameter_layouts, shard_parameters
from fxshard.runtime.rank_graph.bind import BoundProgram, bind, fits
from fxshard.runtime.rank_weights import RankFiles, cut
from fxshard.runtime.ranks.agreement import TIMEOUT
from fxshard.runtime.ranks.compared_fields import debug_field, mesh_fields, shape_fields, weight_fields
from fxshard.runtime.ranks.launch import announce, compare, ends_together, mesh_ranks, objection, share_plan, versions
from fxshard.runtime.simulate.values import argument_values, check_arguments, check_value, sizes_of_call
from fxshard.shapes import evaluate_all, first_broken

log = logging.getLogger("fxshard")
REPLAN = "export it for this mesh; or export with replan=True (--replan), then it runs on any mesh"
AHEAD, OTHERS = "aot_inductor", 'bind it with compiler="inductor" or "eager"'
WEIGHTS = ("inside", "per-rank", "none")
"""Where ``save`` puts the weights."""


@dataclass(frozen=True)
class ExportedProgram(ShardedProgram):
    """A program with its ``weights``: whole parameters and buffers by the model's names; empty if it has none, or if each rank's are in a
    file of their own (``rank_files``). ``planning``: what it was planned from, if it can be planned for other meshes. ``compiled``: its
    code, if it was compiled ahead of time."""

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    rank_files: RankFiles | None = field(default=None, compare=False, repr=False)
    planning: Planning | None = field(default=None, compare=False, repr=False)
    compiled: CompiledCode | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, program: ShardedProgram, weights: Mapping[str, torch.Tensor], **beside: Any) -> ExportedProgram:
        """``program`` with its weights; ``beside``: its other fields."""
        return cls(**{f.name: getattr(program, f.name) for f in fields(ShardedProgram)}, weights=weights, **beside)

    @property
    def whole_weights(self) -> Mapping[str, torch.Tensor]:
        """The weights by name, put together if each rank's are in a file of their own; empty if the program has none."""
        return self.weights if self.rank_files is None else self.rank_files.whole(self)

    def save(self, path: str | Path, weights: str = "inside") -> None:
        """Writes one file for all ranks (``.pt2``), atomically. Raises FileError.

        ``weights``: ``"inside"`` the file; ``"per-rank"``: what each rank holds in a file beside it, ``m.pt2.rank-00000.safetensors`` and
        so on, of which a rank reads its own only; ``"none"``. Weights on meta hold no numbers and are left out.

        Each of the ranks' files is written atomically too, but not all at once: they come before the program. If the process ends in
        between, a program that was at ``path`` is still there, beside new files, which it refuses: their hashes are not in its manifest.
        """
        check_choice("weights", weights, WEIGHTS)
        held = {} if weights == "none" else self.whole_weights
        stored = bool(held) and not any(w.is_meta for w in held.values())
        if weights == "per-rank" and not stored:
            raise FileError("there are no weights to write for the ranks", where=str(path), remedy='export with them, or weights="none"')
        beside: Any = {"planning": self.planning, "compiled": self.compiled}
        if weights == "per-rank":
            archive.save(self, path, shards=cut(self, select_weights(self, held)), **beside)
        else:
            archive.save(self, path, held if stored else None, **beside)

    @classmethod
    def load(cls, path: str | Path) -> ExportedProgram:
        """Reads a program and its weights, if it has any; needs no process group. Raises FileError."""
        found = archive.load_all(path)
        weights = select_weights(found.program, found.weights, str(path), REMAKE) if found.weights else {}
        files = RankFiles(Path(path), found.rank_files) if found.rank_files else None
        return cls.of(found.program, weights, rank_files=files, planning=_checked(found.planning, path), compiled=found.compiled)

    def replan(
        self,
        mesh: Mesh | DeviceMesh,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        pins: Mapping[str, Any] | ShardingPlan | None = None,
        memory_limit: float | str | None = None,
        objective: str = "time",
        cache: bool = True,
    ) -> ExportedProgram:
        """The program for another mesh, planned again from its planning graph, with the same weights. Options are those of ``export``;
        layouts, pins and limits of the first plan, which were for its mesh, do not count.

        Raises PlanError if the program does not hold its planning graph.
        """
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        limits = {"pins": pins, "memory_limit": memory_limit, "objective": objective, "cache": cache}
        return self._with_plan(self._plan_for(as_mesh(mesh), **layouts, **limits))

    def for_mesh(
        self, device_mesh: DeviceMesh, *, hardware: str | Path | Hardware | None = None, timeout: float = TIMEOUT
    ) -> ExportedProgram:
        """The program for ``device_mesh``: itself if it fits, otherwise planned again by the lowest rank for all, with the same weights.

        Every rank of the mesh calls this. ``hardware``: whose prices the plan has, by default those of the mesh's devices. ``timeout``:
        seconds to wait for other ranks, planning included.

        Raises RunError for ranks whose meshes or programs differ, PlanError if the program does not hold its planning graph; on all ranks,
        what one rank raises.
        """
        ranks = mesh_ranks(device_mesh)
        held = {**versions(), **mesh_fields(device_mesh), "plan": self.plan.hash, "program": self.hash}
        compare(held, ranks=ranks, timeout=timeout)
        if fits(self, device_mesh):
            return self
        with ends_together("plan the program for its mesh", ranks=ranks, timeout=timeout):
            graph, mesh = self._planned_from().graph, as_mesh(device_mesh, hardware)
            return self._with_plan(share_plan(lambda: self._plan_for(mesh), ranks=ranks, timeout=timeout, key=graph.hash))

    def _planned_from(self) -> Planning:
        if self.planning is None:
            raise PlanError(f"the program holds no planning graph, so that it runs on mesh {self.mesh} only", remedy=REPLAN)
        return self.planning

    def _plan_for(self, mesh: Mesh, **options: Any) -> ShardingPlan:
        """A plan of the planning graph; ends whose layouts are not given are whole."""
        graph, given = self._planned_from().graph, {name: value for name, value in options.items() if value is not None}
        whole = dict.fromkeys(("input_layouts", "output_layouts"), "R" * mesh.ndim)
        request = Request(train=graph.train, **{**whole, **given})
        if graph.family is None:
            return plan_graph(graph, mesh, request)
        even = not all(dim.uneven for dim in graph.family.dims)
        request = replace(request, dynamic=tuple(replace(dim, uneven=False) for dim in graph.family.dims))
        return lower_for_sizes(request, mesh, None, even=even, graph=graph).plan  # lowering says whether shards can be uneven

    def _with_plan(self, plan: ShardingPlan) -> ExportedProgram:
        """The program of another plan of the planning graph."""
        planning = self._planned_from()
        planning = replace(planning, graph=as_planned(planning.graph, plan))
        program = lower_plan(planning.graph, plan, None, planning.rng, planning.without, legal=True)
        return self.of(program, self.whole_weights, planning=planning)

    def bind(
        self,
        device_mesh: DeviceMesh,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        compiler: str = "inductor",
        device: torch.device | str | None = None,
        timeout: float = TIMEOUT,
        debug: bool = False,
    ) -> BoundModule:
        """The program as a module for this rank, compiled; every rank of the mesh calls this.

        Args:
            weights: whole tensors by the model's names; the program's own by default, of which a rank reads its own file if each has one.
            compiler: ``"inductor"``, ``"eager"``, or ``"aot_inductor"``, which runs the machine code that the program holds, without
                Inductor. Such code does what its author wants: bind only files that you trust so.
            timeout: seconds to wait for other ranks, here and in each collective.
            debug: whether ranks compare each collective before it is issued (docs/faults.md).

        For another mesh the program is planned again, if it holds its planning graph (``for_mesh``).

        Raises PlanError for another mesh if it does not, RunError for a missing weight, or ranks that hold different programs or weights,
        FileError for a rank's file that is missing or damaged. What one rank raises, all do.
        """
        check_device_mesh(device_mesh)
        check_weights(weights)
        check_choice("compiler", compiler, (*COMPILERS, AHEAD))
        check_number("timeout", timeout, optional=False)
        check_flag("debug", debug)
        ahead, fitting = compiler == AHEAD, fits(self, device_mesh)
        if ahead and debug:
            raise OptionError("compiled code issues its collectives itself, debug cannot compare them", where="debug", remedy=OTHERS)
        if ahead and self.compiled is None:
            raise PlanError("the program holds no compiled code", where="compiler", remedy=f"export it with aot_inductor=True, or {OTHERS}")
        if ahead and not fitting:
            raise PlanError(f"the program is for mesh {self.mesh}, the device mesh is {as_mesh(device_mesh)}", remedy=REPLAN)
        if not fitting and self.planning is not None:
            announce(device_mesh, logging.WARNING, "the program is for mesh %s: planning it again for %s", self.mesh, as_mesh(device_mesh))
        program, ranks = self.for_mesh(device_mesh, timeout=timeout), mesh_ranks(device_mesh)
        values, beside = dict(weights or program.weights), None if weights else program.rank_files
        held = {} if program is self else {"plan": program.plan.hash, "program": program.hash}
        held |= {} if beside is None else {"files of the ranks": beside.digest}
        compare({**held, **weight_fields(values), **debug_field(debug)}, ranks=ranks, timeout=timeout)
        with ends_together("bind the program", ranks=ranks, timeout=timeout):
            code = program.compiled if ahead else None
            bound = bind(program, device_mesh, device, axes_of_code(program, code, device_mesh) if code else None)
            if beside is not None:
                values = beside.on_mesh(program, device_mesh, bound.device)
            make: Any = partial(compile_program, compiler=compiler, timeout=timeout, debug=debug)
            if code:
                make = partial(load_program, code, timeout=timeout)
            return BoundModule(program, values, bound, make, ahead)


def _checked(planning: Planning | None, path: str | Path) -> Planning | None:
    """Raises FileError for a planning graph that does not hold together."""
    if planning is None:
        return None
    try:
        verify_graph(planning.graph)
        check_without(planning.without)
    except FxshardError as error:
        raise FileError(f"the planning graph does not hold together: {error.what}", where=str(path), remedy=REMAKE) from None
    return planning


class BoundModule(nn.Module):
    """A program on this rank: called like the model; its parameters are DTensors under the model's names."""

    def __init__(
        self,
        program: ExportedProgram,
        weights: Mapping[str, torch.Tensor],
        bound: BoundProgram,
        compiled: Callable[[BoundProgram], CompiledProgram],
        ahead: bool = False,
    ) -> None:
        super().__init__()
        self._ahead = ahead
        self._program = program
        _hold(self, program, weights)
        shard_parameters(self, parameter_layouts(program), bound.device_mesh, bound.device)
        shapes = zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True)
        self._takes = {end.name: (shape, dtype) for end, shape, dtype in shapes if end.kind == "input"}
        self._compile, self._bound = compiled, bound
        self._compiled = compiled(bound)
        self._ranks_alike = self._compiled.same_guards_on_ranks
        self._ranks, self._timeout = mesh_ranks(bound.device_mesh), self._compiled.watchdog.timeout
        self._runners: dict[Any, Runner] = {}
        self._served: dict[tuple[int, ...], CompiledProgram] = {} if program.sizes else {(): self._compiled}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program; plain tensors are global values.

        Raises RunError for arguments that differ from the traced ones in more than sizes, SizesError for sizes that the program does not
        serve, PlanError if no argument is a DTensor and an output is not replicated.
        """
        args, kwargs, objects = open_call(args, kwargs)
        names, leaves = leaf_names(args, kwargs), Leaves(pytree.tree_leaves((args, kwargs)))
        leaves.objects = objects
        if not self._runners:
            compare(shape_fields(argument_values(args, kwargs)), ranks=self._ranks, timeout=self._timeout)
        compiled = self._served_by(self._check(args, kwargs))
        key = compiled, *((name, isinstance(leaf, DTensor)) for name, leaf in zip(names, leaves, strict=True))
        if key not in self._runners:
            self._runners[key] = Runner(compiled, names, self, self._timeout)
        return self._runners[key](leaves)

    def _check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """Checks that the program takes these arguments, and returns the dynamic sizes of the call."""
        check_arguments(self._program, args, kwargs)
        given, sizes = argument_values(args, kwargs), sizes_of_call(self._program, args, kwargs)
        if tuple(sizes.values()) not in self._served:
            self._refuse(sizes)
        values = self._program.values(sizes)
        for name, (shape, dtype) in self._takes.items():
            check_value(name, given[name], evaluate_all(shape, values) if values else shape, dtype)
        return sizes

    def _refuse(self, sizes: Mapping[str, int]) -> None:
        """Raises SizesError for sizes that the program does not serve."""
        reason = self._program.refuses(sizes)
        if reason is not None:
            raise SizesError(reason, remedy="give sizes that the file serves (fxshard inspect shows them), or export the model for these")

    def _served_by(self, sizes: Mapping[str, int]) -> CompiledProgram:
        """The compiled program for a call of these sizes; compiles one for them alone if some rank's compiled code does not serve them."""
        key = tuple(sizes.values())
        if key in self._served:
            return self._served[key]
        guard = first_broken(self._compiled.guards, sizes)
        mine = None if guard is None else str(guard)
        found = mine if self._ranks_alike else objection(mine, ranks=self._ranks, timeout=self._timeout)
        compiled = self._compiled
        if found is not None and self._ahead:
            raise SizesError(f"the compiled code takes for granted that {found}", where=str(sizes), remedy=OTHERS)
        if found is not None:
            said = ", ".join(f"{name}={size}" for name, size in sizes.items())
            text = "compiling once more, for %s alone: the compiler takes for granted that %s"
            announce(self._bound.device_mesh, logging.WARNING, text, said, found)
            compiled = self._compile(bind(program_at(self._program, sizes), self._bound.device_mesh, self._bound.device))
        self._served[key] = compiled
        return compiled

    def layouts(self) -> dict[str, Layout]:
        """Layout of each parameter on the mesh."""
        return {name: Layout(p.placements) for name, p in self.named_parameters() if isinstance(p, DTensor)}


def lower_for_sizes(request: Request, mesh: Mesh, dump: Dump, *, even: bool, graph: PlanningGraph | None = None) -> ShardedProgram:
    """Plans and lowers what ``request`` asks for, or its ``graph``, for all sizes of its dynamic dims.

    Unless ``even``, shards may have unequal lengths. If no such program is possible, makes one for even sizes only, and logs a warning.
    """
    if request.dynamic and not even:
        loose = replace(request, dynamic=tuple(replace(dim, uneven=True) for dim in request.dynamic))
        try:
            return _lowered(loose, mesh, dump, graph and graph.for_shards(uneven=True))
        except SizesError as error:
            log.warning("sizes that the mesh does not cut evenly are not served: %s", error.what)
    return _lowered(request, mesh, dump, graph and graph.for_shards(uneven=False))


def as_planned(graph: PlanningGraph, plan: ShardingPlan) -> PlanningGraph:
    """``graph`` for the shards, of unequal lengths or of equal ones only, for which ``plan`` is."""
    found = (graph.for_shards(uneven=uneven) for uneven in (True, False))
    return next((one for one in found if one.hash == plan.graph_hash), graph)


def _lowered(request: Request, mesh: Mesh, dump: Dump, graph: PlanningGraph | None = None) -> ShardedProgram:
    state = run(LOWERING, make_plan(Compilation(mesh, request, graph), dump), dump)
    assert state.program is not None
    return state.program


def _hold(root: nn.Module, program: ShardedProgram, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives ``root`` the program's parameters and buffers under their names; makes submodules as needed."""
    graded = {end.name for end in program.outputs if end.kind == "gradient"}
    changing = graded | {end.name for end in program.outputs if end.kind == "mutation"}
    for end, shape, dtype in zip(program.inputs, program.input_shapes, program.input_dtypes, strict=True):
        if end.kind not in ("parameter", "buffer"):
            continue
        if end.name not in weights:
            raise RunError(f"no weight {end.name!r}", remedy="pass weights=, whole tensors by the model's names")
        value = weights[end.name].detach()
        value = value.clone() if end.name in changing else value  # not the caller's own memory, nor the program's
        check_value(end.name, value, shape, dtype)
        *path, key = end.name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if end.kind == "parameter":
            owner.register_parameter(key, nn.Parameter(value, requires_grad=end.name in graded))
        else:
            owner.register_buffer(key, value.clone())
