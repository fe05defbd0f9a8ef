"""The pipeline: from a model to a plan and a program, pass by pass.

Every pass takes a ``Compilation`` and returns it with one more field set; passes share no other state.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fxshard import disk_cache
from fxshard.errors import OptionError, PlanError, closest
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.graph.side_effects import Attribute
from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering import optimise
from fxshard.passes.annotation import annotate, verify
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.recompute import expanded
from fxshard.passes.lowering import lower
from fxshard.passes.lowering.generator import check_generator, draw_from
from fxshard.passes.planning import constrain
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.defer_reductions import defer_reductions
from fxshard.passes.runner import Dump, Pass, PassRecord, dump_folder, run_passes
from fxshard.passes.structured_trace import graphs_text, show_plan, show_program
from fxshard.passes.trace import trace
from fxshard.passes.trace.fakes.mixed_precision import MixedPrecision
from fxshard.plans.constraints import OBJECTIVES
from fxshard.plans.parallel import AxisPlan
from fxshard.plans.plan_text import whole_text
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.program.verify_program import verify_program
from fxshard.shapes import DynamicDim, WeightedSizes, largest_sizes
from fxshard.views.fallbacks import by_cause

if TYPE_CHECKING:  # the passes import these when needed: a cached plan needs no solver
    from fxshard.passes.planning.formulation import Formulation
    from fxshard.solver import Solved

log = logging.getLogger("fxshard")


@dataclass(frozen=True)
class Request:
    """The user's request; fields as in ``fxshard.plan``. ``without``: passes after lowering to leave out; ``observe``, ``written``: as in
    ``trace``; ``sampled``: the plan's ``example_sizes``."""

    model: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    train: bool = True
    input_layouts: Any = None
    output_layouts: Any = None
    pins: Any = None
    memory_limit: float | str | None = None
    objective: str = "time"
    time_limit: float | None = None
    constraints: Any = None
    optimizer: Any = None
    cache: bool = True
    rng: str = "fxshard"
    without: tuple[str, ...] = ()
    mixed_precision: MixedPrecision | None = None
    observe: bool = False
    dynamic: tuple[DynamicDim, ...] = ()
    sampled: tuple[WeightedSizes, ...] = ()
    written: frozenset[Attribute] = frozenset()
    parallel: Mapping[str, AxisPlan] = field(default_factory=dict)
    offload: Any = None
    returned_whole: frozenset[str] = frozenset()
    """As in ``Constraints``: names of inputs."""


@dataclass(frozen=True)
class Compilation:
    """The state between passes; a field is None until its pass has run. ``cached``: the cache file of the plan, if any; ``legal``: whether
    the plan has already been verified for the graph."""

    mesh: Mesh
    request: Request = field(default_factory=Request)
    graph: PlanningGraph | None = None
    annotated: Annotated | None = None
    constraints: Constraints | None = None
    formulation: Formulation | None = None
    session: Solved | None = None
    plan: ShardingPlan | None = None
    program: ShardedProgram | None = None
    records: tuple[PassRecord, ...] = ()
    cached: Path | None = None
    legal: bool = False


def _trace(c: Compilation) -> tuple[Compilation, str]:
    r = c.request
    assert r.model is not None
    seen: dict[str, Any] = {"observe": r.observe, "written": r.written, "cache": r.cache}
    graph = trace.trace(r.model, r.args, r.kwargs, train=r.train, mixed_precision=r.mixed_precision, dynamic=r.dynamic, **seen)
    verify.verify_graph(graph)
    return replace(c, graph=graph), f"graph of {len(list(graph.nodes))} nodes, hash {graph.hash[:12]}"


def _annotate(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None
    r, family = c.request, c.graph.family
    largest = None
    if family is not None and r.memory_limit is not None:
        own = [dim for dim in family.dims if dim.name not in family.derived]
        guards = [one for one in family.guards if not any(name in family.derived for name, *_ in one.symbols)]
        largest = family.with_derived(largest_sizes(own, r.sampled, math.prod(c.mesh.shape), guards))
    made = annotate.annotate(c.graph, c.mesh, r.sampled, largest)
    for heading, found in by_cause(made.fallbacks).items():
        some = ", ".join(node for node, _ in found[:5])
        nodes = "1 node is" if len(found) == 1 else f"{len(found)} nodes are"
        log.warning("%s %s: %s; plan.fallbacks lists all, with reasons", nodes, heading, some)
    count, most = sum(map(len, made.specs.values())), max((len(s) for s in made.specs.values()), default=0)
    return replace(c, annotated=made), f"{count} specs, at most {most} a node, {len(made.fallbacks)} fallbacks"


def _constrain(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None
    r = c.request
    found = constrain.constraints_of(
        c.graph,
        c.mesh,
        input_layouts=r.input_layouts,
        output_layouts=r.output_layouts,
        pins=r.pins,
        memory_limit=r.memory_limit,
        constraints=r.constraints,
        optimizer=r.optimizer,
        parallel=r.parallel,
        offload=r.offload,
        returned_whole=r.returned_whole,
    )
    if found.communication and r.sampled:
        what = f"{found.communication[0]} counts bytes at one size, and example_sizes names {len(r.sampled)}"
        raise OptionError(what, where="example_sizes", remedy="leave one of the two out")
    summary = f"{len(found.values)} pinned values, {len(found.results)} pinned results, {len(found.specs)} pinned specs"
    summary += f", {len(found.equal)} equalities, {len(found.communication)} limits on communication"
    return replace(c, constraints=found), summary


def _formulate(c: Compilation) -> tuple[Compilation, str]:
    from fxshard.passes.planning import admissible_specs, formulate

    assert c.annotated is not None and c.constraints is not None
    admissible_specs.log_waived(c.annotated, c.constraints)
    made = formulate.formulate(c.annotated, c.constraints, c.request.objective)
    return replace(c, formulation=made), f"{len(made.problem.node_costs)} variables, {len(made.problem.transfers)} transfers"


UNLIMITED_SHARE = 0.25
"""Fraction of a time limit for the plan without the memory limit; a work limit applies to it in full."""


def _choose(c: Compilation) -> tuple[Compilation, str]:
    from fxshard.passes.planning import choose

    assert c.annotated is not None and c.constraints is not None and c.formulation is not None
    limited, formulation, found = c.constraints.memory_limit is not None, c.formulation, None
    budget = choose.allowance(c.request.time_limit, limited=limited)
    if limited:
        free = budget.share(UNLIMITED_SHARE) if c.request.time_limit is not None else choose.allowance(None)
        found = choose.solve_without_memory_limit(c.annotated, c.constraints, c.request.objective, free)
    if found is not None and choose.keeps_limit(found[0]):
        plan, formulation, session = found
    else:
        bound = -math.inf if found is None else choose.bound_within_limit(found[0])
        if found is not None:
            formulation = formulation.starting_from(found[1], found[2].solution.choices)
        session = choose.solved(c.annotated, c.constraints, formulation, budget, bound)
        plan = choose.decide(c.annotated, c.constraints, formulation, session.solution)
    summary = f"objective {plan.objective:.6g} {plan.certificate.unit}, gap {plan.gap:.4%}, {len(plan.collectives)} collectives"
    return replace(c, plan=plan, formulation=formulation, session=session), summary


def _verify(c: Compilation) -> tuple[Compilation, str]:
    assert c.annotated is not None and c.plan is not None
    verify.verify_plan(expanded(c.annotated, c.plan.recomputed), c.plan)
    return c, "plan is legal"


def _lower(c: Compilation) -> tuple[Compilation, str]:
    assert c.graph is not None and c.plan is not None
    checked = lower.check_plan(c.graph, c.plan)
    if c.annotated is None and not c.legal:  # a plan from elsewhere: its specs are checked here
        verify.verify_specs(annotate.annotate(checked, c.plan.mesh), c.plan)
    program = lower.lower_checked(c.graph, checked, c.plan)
    draw_from(program, c.request.rng)
    verify_program(program)
    return replace(c, program=program), f"{len(program.modules)} local graphs, {len(program.collectives)} collectives"


def _optimising(name: str) -> Callable[[Compilation], tuple[Compilation, str]]:
    def optimise_(c: Compilation) -> tuple[Compilation, str]:
        assert c.program is not None
        if name in c.request.without:
            return c, "left out, as asked"
        program = optimise.optimised(c.program, name)
        if program.modules is not c.program.modules:
            verify_program(program)
        effect = program.effects[-1]
        summary = f"{effect.before.total:,.0f} us before, {effect.after.total:,.0f} after"
        summary += f"; collectives: {effect.collectives[0]} before, {effect.collectives[1]} after"
        return replace(c, program=program), summary + (f"; not taken: {effect.left_out}" if effect.left_out else "")

    return optimise_


def _specs(c: Compilation) -> str:
    assert c.annotated is not None
    return "\n".join(f"{node}:\n  " + "\n  ".join(map(str, specs)) for node, specs in c.annotated.specs.items())


def _variables(c: Compilation) -> str:
    assert c.formulation is not None
    problem = c.formulation.problem
    return "\n".join(f"{problem.name(i)}: {len(costs)} states" for i, costs in enumerate(problem.node_costs))


def _effect(c: Compilation) -> str:
    """The timelines before and after the last pass, and the graphs."""
    assert c.program is not None
    events = c.program.effects[-1].after.events if c.program.effects else ()
    lines = [f"{e.start:12.1f} {e.end:12.1f} {e.stream:8s} {e.name}" for e in events]
    return "\n".join(["timeline: start, end (us), stream, node", *lines, "", _modules(c)])


def _modules(c: Compilation) -> str:
    assert c.program is not None
    return graphs_text(c.program)


def _graph(c: Compilation) -> str:
    assert c.graph is not None
    return str(c.graph.module.graph)


def _whole_plan(c: Compilation) -> str:
    assert c.plan is not None
    return whole_text(c.plan)


PLANNING: tuple[Pass, ...] = (
    Pass("trace", _trace, _graph),
    Pass("annotate", _annotate, _specs),
    Pass("constrain", _constrain, lambda c: str(c.constraints)),
    Pass("formulate", _formulate, _variables),
    Pass("choose", _choose, _whole_plan),
    Pass("verify", _verify, _whole_plan),
)
LOWERING: tuple[Pass, ...] = (
    Pass("lower", _lower, _modules),
    Pass("schedule", _optimising("schedule"), _effect),
    Pass("chunk", _optimising("chunk"), _effect),
    Pass("bucket", _optimising("bucket"), _effect),
)
PIPELINE = (*PLANNING, *LOWERING)
FIRST_SOLVER_PASS = next(place for place, one in enumerate(PLANNING) if one.name == "formulate")
"""Index of the first pass that a cached plan replaces."""


def run(passes: Sequence[Pass], state: Compilation, dump: Dump = None) -> Compilation:
    """Runs part of the pipeline; raises OptionError for an invalid objective, generator or time limit."""
    request = state.request
    if request.objective not in OBJECTIVES:
        what = f"unknown objective {request.objective!r}{closest(request.objective, OBJECTIVES)}"
        raise OptionError(what, where="objective", remedy=f"use one of {', '.join(OBJECTIVES)}")
    check_generator(request.rng)
    limit = request.time_limit
    if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
        raise OptionError(f"cannot read time_limit={limit!r}", where="time_limit", remedy="give seconds, more than 0")
    made = run_passes(passes, state, dump, first=PIPELINE.index(passes[0]))
    if passes[-1] is PLANNING[-1] and made.plan is not None:
        show_plan(made.plan)
    if passes[-1] is LOWERING[-1] and made.program is not None:
        show_program(made.program)
    return made


NOT_IN_CACHE_KEY = (
    *("model", "args", "kwargs", "mixed_precision", "input_layouts", "output_layouts", "pins", "constraints"),
    *("memory_limit", "optimizer", "cache", "rng", "without", "offload", "returned_whole"),
)
"""Fields of a request that the graph and the constraints already contain, or that do not affect the plan."""


CACHED = "the plan"
"""What a cache file holds, for the log."""


def make_plan(state: Compilation, dump: Dump = None) -> Compilation:
    """Plans from the model or from a traced graph; a plan made before comes from the cache.

    If stages are dumped, all passes run.
    """
    first = 0 if state.graph is None else 1
    state = run(PLANNING[first:FIRST_SOLVER_PASS], state, dump)
    path = _cache_file(state) if state.request.cache else None
    if path is not None and dump_folder(dump) is None:
        known = _from_cache(state, path)
        if known is not None:
            return known
    state = run(PLANNING[FIRST_SOLVER_PASS:], state, dump)
    assert state.plan is not None
    by_chance = state.plan.certificate.cut and state.request.time_limit is not None  # another run may end with another plan
    if path is not None and not by_chance:
        disk_cache.write(path, CACHED, state.plan.to_json)
    return state


def _cache_file(state: Compilation) -> Path | None:
    assert state.graph is not None
    asked = {f.name: getattr(state.request, f.name) for f in fields(state.request) if f.name not in NOT_IN_CACHE_KEY}
    return disk_cache.file_for("plan", graph=state.graph.hash, mesh=state.mesh, constraints=state.constraints, **asked)


def _from_cache(state: Compilation, path: Path) -> Compilation | None:
    """The state with the cached plan; None if there is none that is legal for this graph."""
    assert state.graph is not None
    start = time.perf_counter()
    plan = disk_cache.read(path, CACHED, lambda text: _legal_plan(state, text))
    if plan is None:
        return None
    log.info("the plan is from the cache: %s", path)
    plan = replace(plan, lines=state.graph.lines, model=state.graph.model)  # lines may have moved since
    show_plan(plan)
    record = PassRecord("recall", (time.perf_counter() - start) * 1e3, f"plan from the cache, {path}")
    return replace(state, plan=plan, cached=path, records=(*state.records, record))


def _legal_plan(state: Compilation, text: bytes) -> ShardingPlan:
    """The plan in a text; raises FileError or PlanError unless it is legal for the graph and mesh."""
    assert state.graph is not None and state.annotated is not None
    plan = ShardingPlan.from_json(text)
    if plan.mesh != state.mesh or plan.graph_hash != state.graph.hash or plan.partial:
        raise PlanError("it is for another graph or mesh")
    verify.verify_plan(expanded(state.annotated, plan.recomputed), plan)
    return plan


def trace_model(request: Request, mesh: Mesh, dump: Dump = None) -> PlanningGraph:
    """Traces the request's model, as the first pass of a pipeline does."""
    state = run(PLANNING[:1], Compilation(mesh, request), dump)
    assert state.graph is not None
    return state.graph


def plan_graph(graph: PlanningGraph, mesh: Mesh, request: Request, dump: Dump = None) -> ShardingPlan:
    """Plans a traced graph."""
    state = make_plan(Compilation(mesh, request, graph), dump)
    assert state.plan is not None
    return state.plan


def lower_deferred(graph: PlanningGraph, plan: ShardingPlan, rng: str = "fxshard") -> ShardedProgram:
    """Lowers a plan so that the gradients of parameters are returned as pending sums; legal if ``plan`` is."""
    program = lower.lower(graph, defer_reductions(graph, plan), deferred=True)
    draw_from(program, rng)
    verify_program(program, deferred=True)
    return program


def lower_plan(
    graph: PlanningGraph, plan: ShardingPlan, dump: Dump = None, rng: str = "fxshard", without: Sequence[str] = (), legal: bool = False
) -> ShardedProgram:
    """Lowers a plan and runs the passes after lowering except ``without``; raises PlanError if the plan is for another graph.

    ``legal``: the plan comes from ``plan_graph`` for this graph, here or on another rank, and is verified.
    """
    request = Request(rng=rng, without=optimise.check_without(without))
    state = run(LOWERING, Compilation(plan.mesh, request, graph, plan=plan, legal=legal), dump)
    assert state.program is not None
    return state.program
