"""choose: solves the problem and records the solution as a ShardingPlan."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from fxshard.byte_sizes import exact_size
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.errors import ConstraintError, PlanError
from fxshard.graph.planning_graph import PlanningGraph, is_getitem, operands, outputs_of, plain_shape, producer
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Price
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.lifetimes import Lifetimes
from fxshard.passes.annotation.recompute import Recomputed, expanded
from fxshard.passes.memory.memory_over_time import allocations, total_over_time
from fxshard.passes.memory.offload import DEVICE, KIND, HostCopies
from fxshard.passes.memory.planned_memory import Shortage, memory_at_peak, planned_profile
from fxshard.passes.planning import communication_limits
from fxshard.passes.planning.admissible_specs import conflict_error, plan_pin_text, user_location
from fxshard.passes.planning.constrain import Constraints, Equality
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.planning.patterns import Condition
from fxshard.passes.planning.redistributions import Specs, hiding, redistributions
from fxshard.plans.constraints import OBJECTIVES
from fxshard.plans.offload import KINDS, OPTIMIZER
from fxshard.plans.plan_data import Certificate, OpSpec, Place, PlanEnd, PlannedNode, Redistribution, again
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.shapes import WeightedSizes
from fxshard.solver import Budget, Counts, InfeasibleError, LimitedSession, NoPlanError, Session, Solution, Solved, solve_within, warm_up
from fxshard.strategies import own_collectives

WORK_LIMIT = 6e9
"""Table entries that a solve may read when the user sets no time limit: about half a minute. Counting work instead of time keeps plans
reproducible; a plan whose solve was cut short says so."""

LIMITED_WORK = 1.3e10
"""The same for all solves under a memory limit together; two thirds of it go to the relaxed problem, which gives the bound."""

ROUNDING = 1e-8
"""Relative gap that the solver's integer costs may leave when costs are far below a microsecond. A larger gap counts as unproven."""

COST_TOLERANCE = 1e-9
"""Two sums of the same costs count as equal up to this relative difference."""

NO_STATE = Optimizer()


def allowance(time_limit: float | None, *, limited: bool = False) -> Budget:
    """The solver's budget: the user's seconds, counted once the solver is compiled, or a fixed amount of work.

    ``limited``: for a problem with a memory limit.
    """
    if time_limit is not None:
        warm_up()
    work = LIMITED_WORK if limited else WORK_LIMIT
    return Budget(time_limit, work if time_limit is None else None)


def solve_without_memory_limit(
    annotated: Annotated, constraints: Constraints, objective: str, budget: Budget
) -> tuple[ShardingPlan, Formulation, Solved] | None:
    """The plan found without the memory limit, with its problem and solve; None if none is found.

    If it happens to keep the limit, it is also optimal under the limit, no matter in which layouts values are saved for the backward.
    """
    limit, free = constraints.memory_limit, dataclasses.replace(constraints, memory_limit=None)
    formulation = formulate(annotated, free, objective)
    try:
        session = Session(formulation.problem, budget, formulation.start)
    except (InfeasibleError, NoPlanError):  # the limited problem gives a better error
        return None
    plan = decide(annotated, free, formulation, session.solution)
    return dataclasses.replace(plan, memory_limit=limit), formulation, session


def keeps_limit(plan: ShardingPlan) -> bool:
    """Whether a plan's memory is within its limit."""
    return plan.memory_limit is None or sum(plan.memory.values()) <= plan.memory_limit


def bound_within_limit(free: ShardingPlan) -> float:
    """A lower bound for plans under the memory limit, from the plan without it, in the unit of the objective.

    -inf if communication can be hidden: under the limit, a value gathered again in the backward may be hidden where a value gathered once
    is not, so the problem without the limit is not a relaxation.
    """
    hides = free.certificate.unit == "microseconds" and free.mesh.hardware.overlap > 0
    return -math.inf if hides else free.lower_bound


def solved(
    annotated: Annotated,
    constraints: Constraints,
    formulation: Formulation,
    budget: Budget,
    bound: float = -math.inf,
) -> Solved:
    """Solves the problem and keeps the session for later questions; raises ConstraintError if no plan is found.

    ``bound``: a lower bound on plans under the memory limit, in the unit of the objective.
    """
    try:
        if formulation.relaxed is None:
            return Session(formulation.problem, budget, formulation.start)
        counts = Counts(formulation.problem, formulation.relaxed, partial(memory_over_time, annotated, constraints, formulation))
        return LimitedSession(counts, budget, formulation.start, bound)
    except InfeasibleError as error:
        raise infeasible_error(error, annotated, constraints, formulation, budget) from error
    except NoPlanError as error:
        for miss in error.misses:
            if miss.least_usage is not None and miss.row is None:
                raise _shortage(miss, annotated, constraints, formulation).not_found(budget.time_limit) from error
        raise _not_found(error, annotated, constraints, budget) from error


def _not_found(error: NoPlanError, annotated: Annotated, constraints: Constraints, budget: Budget) -> ConstraintError:
    """The error for a search that ended without a plan, where it is not for the memory limit alone."""
    ended = "the solver's own work limit" if budget.time_limit is None else f"time_limit={budget.time_limit:g}"
    where = ended if error.cut else f"mesh {annotated.mesh}"
    if error.together:
        memory = f"memory_limit={exact_size(constraints.memory_limit or 0)}"
        every = " and ".join(memory if name is None else name for name in error.together)
        what = f"no plan was found that meets {every}, nor a proof that there is none; each of them can be met alone"
        return ConstraintError(what, where=where, remedy="loosen one of them; a plan without it shows how much of it the others take")
    more = "give the solver more time (time_limit=SECONDS), or " if error.cut else ""
    return ConstraintError(str(error), where=where, remedy=f"{more}loosen memory_limit, the constraints and the pins")


def memory_over_time(annotated: Annotated, constraints: Constraints, formulation: Formulation, choices: Sequence[int]) -> np.ndarray:
    """Bytes that the plan of these choices holds at each time of the problem's lives."""
    times, specs, moves, on_host = _in_memory(annotated, formulation, choices)
    found = allocations(times, specs, moves, annotated.mesh, constraints.optimizer, on_host)
    counted = np.zeros(max(formulation.times.values()) + 1)
    for (node, _), bytes_ in zip(times.time.items(), total_over_time(found).at(list(times.time.values())), strict=True):
        counted[formulation.times[node.name]] = bytes_
    return counted


def _in_memory(
    annotated: Annotated, formulation: Formulation, choices: Sequence[int]
) -> tuple[Lifetimes, Specs, list[Redistribution], Mapping[str, str]]:
    """The lifetimes, specs and redistributions of the plan of these choices, at the sizes that its memory refers to; and ``on_host``."""
    decision = _decision(annotated.graph, formulation, choices)
    annotated, specs = _expanded(annotated.at_memory_sizes, decision)
    return annotated.times, specs, redistributions(annotated, specs, formulation.price, decision.kept, None), decision.on_host


def decide(annotated: Annotated, constraints: Constraints, formulation: Formulation, solution: Solution) -> ShardingPlan:
    """Turns a solution of the problem into a plan with its certificate."""
    decision = _decision(annotated.graph, formulation, solution.choices)
    plan = write_plan(annotated, decision, formulation.price, formulation.unit, constraints.memory_limit, constraints.optimizer)
    if not math.isclose(plan.objective, solution.objective, rel_tol=COST_TOLERANCE, abs_tol=COST_TOLERANCE):
        what = f"the plan costs {plan.objective}, but the solver computed {solution.objective}"
        raise PlanError(what, where=f"plan on mesh {plan.mesh}", remedy="this is a fault of the choose pass; please report it")
    communication_limits.check_limits(plan, constraints.communication)
    if constraints.memory_limit is not None and sum(plan.memory.values()) > constraints.memory_limit:
        what = f"the plan takes {sum(plan.memory.values())} bytes, more than memory_limit={constraints.memory_limit}"
        raise PlanError(what, where=f"plan on mesh {plan.mesh}", remedy="this is a fault of the formulate pass; please report it")
    bound = min(solution.lower_bound, plan.objective)
    if plan.objective - bound <= COST_TOLERANCE * plan.objective:
        bound = plan.objective
    cut = solution.cut or plan.objective - bound > ROUNDING * plan.objective
    return dataclasses.replace(plan, certificate=Certificate(formulation.unit, plan.objective, bound, cut))


@dataclasses.dataclass(frozen=True)
class Decision:
    """The content of a plan: an OpSpec per node, the layouts in which values are saved for the backward, the recomputed blocks, and the
    places of parameters that are not on the device."""

    specs: Specs
    kept: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    recomputed: Recomputed = dataclasses.field(default_factory=dict)
    places: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def on_host(self) -> Mapping[str, str]:
        """As in ``PlanData``."""
        return {name: KIND[place] for name, place in self.places.items()}


def _decision(graph: PlanningGraph, formulation: Formulation, choices: Sequence[int]) -> Decision:
    """Translates the solver's choices."""
    specs = {name: options[choices[var]] for name, (var, options) in formulation.node_vars.items()}
    results = {index: layouts[choices[var]] for index, (var, layouts) in formulation.result_vars.items()}
    specs["output"] = OpSpec(_returned(graph, specs, results), ())
    kept = {k.crossing.value.name: layout for k in formulation.kept if (layout := k.layouts[choices[k.var]]) is not None}
    redone = {block.name: tuple(n.name for n in block.nodes) for var, block in formulation.blocks.items() if choices[var]}
    chosen = {name: formulation.places[var][choices[var]] for name, (var, _) in formulation.node_vars.items() if var in formulation.places}
    return Decision(specs, kept, redone, {name: place for name, place in chosen.items() if place != DEVICE})


def _returned(graph: PlanningGraph, specs: Specs, results: Mapping[int, Layout]) -> tuple[Layout, ...]:
    """Layouts of all results: gradients and mutated buffers take those of their inputs, unless they are results of their own."""
    nodes = {i.name: i.node for i in graph.inputs if i.kind in ("parameter", "buffer", "input")}
    return tuple(results[k] if k in results else specs[nodes[o.name]].outputs[0] for k, o in enumerate(graph.outputs))


def write_plan(
    annotated: Annotated, decision: Decision, price: Price, unit: str, memory_limit: int | None = None, optimizer: Optimizer = NO_STATE
) -> ShardingPlan:
    """Makes a plan from a decision: adds the redistributions, each paid once, and recomputes the objective from the entries."""
    traced, mesh = annotated, annotated.mesh
    annotated, specs = _expanded(annotated, decision)
    graph = annotated.graph
    timed = unit == "microseconds"
    nodes = tuple(_planned_node(n, annotated, specs[n.name], timed) for n in annotated.times.operands)
    hides = hiding(traced, decision.recomputed) if timed else None
    moves = tuple(redistributions(annotated, specs, price, decision.kept, hides))
    offloaded = HostCopies(annotated.times, mesh, optimizer, unit).entries(specs, decision.places) if decision.places else ()
    total = math.fsum([*(n.compute for n in nodes), *(m.cost for m in moves), *(one.cost for one in offloaded)])
    returned = annotated.times.operands[graph.module.graph.output_node()]
    return ShardingPlan(
        mesh=mesh,
        train=graph.train,
        graph_hash=traced.graph.hash,
        nodes=nodes,
        redistributions=moves,
        certificate=Certificate(unit, total, 0.0),
        inputs=tuple(PlanEnd(i.kind, i.name, i.node) for i in graph.inputs),
        outputs=tuple(PlanEnd(o.kind, o.name, n.name) for o, n in zip(graph.outputs, returned, strict=True)),
        memory=memory_at_peak(annotated.at_memory_sizes.times, specs, moves, mesh, optimizer, decision.on_host),
        memory_limit=memory_limit,
        memory_sizes=dict(annotated.at_memory_sizes.sizes),
        example_sizes=tuple(WeightedSizes(one.sizes, weight) for weight, one in annotated.samples),
        fallbacks=annotated.fallbacks,
        lines=graph.lines,
        model=graph.model,
        places={name: Place(*place) for name, place in graph.places.items() if name in specs},
        reads={n.name: tuple(producer(o)[0].name for o in read) for n, read in annotated.times.operands.items() if read},
        results={n.name: found for n, read in annotated.times.operands.items() if any(found := tuple(producer(o)[1] for o in read))},
        picked={m.value: (producer(n)[0].name, producer(n)[1]) for m in moves if is_getitem(n := graph.by_name[m.value])},
        recomputed=decision.recomputed,
        offloaded=offloaded,
    )


def _expanded(annotated: Annotated, decision: Decision) -> tuple[Annotated, Specs]:
    """The annotated graph and specs with recomputed nodes added; a second run has the spec of the first."""
    names = {again(name): name for nodes in decision.recomputed.values() for name in nodes}
    return expanded(annotated, decision.recomputed), {**decision.specs, **{new: decision.specs[old] for new, old in names.items()}}


def _planned_node(node: fx.Node, annotated: Annotated, spec: OpSpec, timed: bool) -> PlannedNode:
    call = annotated.calls.get(node.name)

    def made() -> PlannedNode:
        values = [v for v in outputs_of(node) if v is not None] if node.op != "output" else []
        return PlannedNode(
            name=node.name,
            op=name_of(node.target) if node.op == "call_function" else node.op,
            spec=spec,
            shapes=tuple(plain_shape(v.shape) for v in values),
            dtypes=tuple(str(v.dtype).removeprefix("torch.") for v in values),
            compute=_node_cost(node.name, annotated, spec, timed),
            collectives=() if call is None else own_collectives(call, spec, annotated.mesh),
        )

    return annotated.plan_entries(("node", node.name, timed), (spec,), made)


def _node_cost(node: str, annotated: Annotated, spec: OpSpec, timed: bool) -> float:
    """Microseconds of a node under a spec, or the bytes that its own collectives send; equal nodes share the result."""
    prices = annotated.prices
    costs = prices.computing if timed else prices.sending
    return annotated.plan_entries(("cost", timed), (*prices.calls(node), spec), lambda: float(costs(node, (spec,))[0]))


def infeasible_error(
    error: InfeasibleError, annotated: Annotated, constraints: Constraints, formulation: Formulation, budget: Budget
) -> ConstraintError:
    """The error that names the user's conflicting constraints, or the least memory or communication found."""
    if error.least_usage is not None and error.row is None:
        return _shortage(error, annotated, constraints, formulation).impossible()
    objective = OBJECTIVES[formulation.unit == "bytes"]
    if error.least_usage is not None:
        return _communication_error(error, annotated, constraints, objective, budget)
    requirements = minimal_conflict(annotated, constraints, objective, not error.nodes, budget.last().seconds_left)
    if not requirements:
        where = f"mesh {annotated.mesh}"
        return ConstraintError(f"no plan exists: {error}", where=where, remedy="a rule allows too few layouts; please report it")
    return _conflict_error(requirements, annotated)


def _conflict_error(requirements: Sequence[Requirement], annotated: Annotated) -> ConstraintError:
    nodes = [annotated.graph.by_name[w.node] for w in requirements if w.node]
    places = dict.fromkeys(user_location(n, annotated.graph) for n in nodes)
    return conflict_error([w.user_text for w in requirements], "; ".join(places) or f"mesh {annotated.mesh}")


def _communication_error(
    error: InfeasibleError, annotated: Annotated, constraints: Constraints, objective: str, budget: Budget
) -> ConstraintError:
    """The error for a communication limit that is too low; names the constraints that conflict with it, if any."""
    assert error.least_usage is not None
    least = f"the least found is {exact_size(int(error.least_usage))} per rank; raise the limit"
    limits = tuple(limit for limit in constraints.communication if str(limit) == error.row)
    alone = dataclasses.replace(constraints, communication=limits, memory_limit=None)
    requirements = minimal_conflict(annotated, alone, objective, True, budget.last().seconds_left)
    if len(requirements) < 2:
        remedy = f"{least}, or loosen the other constraints"
        return ConstraintError(f"nothing fits in {error.row}", where=f"mesh {annotated.mesh}", remedy=remedy)
    odds = _conflict_error(requirements, annotated)
    return ConstraintError(odds.what, where=odds.where, remedy=f"{least}, or {odds.remedy}")


def _shortage(error: InfeasibleError, annotated: Annotated, constraints: Constraints, formulation: Formulation) -> Shortage:
    """The shortage under the memory limit, with the contents of memory in the plan that needs the least."""
    assert error.least_usage is not None and error.usage_bound is not None and constraints.memory_limit is not None
    profile, mesh = None, annotated.mesh
    if error.least_choices:
        times, specs, moves, on_host = _in_memory(annotated, formulation, error.least_choices)
        profile = planned_profile(times, specs, moves, mesh, constraints.optimizer, on_host)
    least, bound, sizes = error.least_usage, error.usage_bound, annotated.at_memory_sizes.sizes
    has_state, offload = constraints.optimizer.bytes_per_element(torch.float32) > 0, constraints.offload
    kinds = [kind for kind in KINDS if kind not in offload.kinds and (has_state or kind != OPTIMIZER)]
    more = () if offload.fixed is not None else tuple(kinds)
    return Shortage(constraints.memory_limit, least, bound, mesh, profile, sizes, has_state, more)


@dataclasses.dataclass(frozen=True)
class Requirement:
    """One of the user's constraints at one place: on a value or result (by ``key``), a node's spec, an equality, or a limit.

    ``user_text``: the user's text, equal for all places that one glob matches; ``node``: where it applies (empty for a limit).
    """

    kind: str
    key: Any
    wanted: Any
    user_text: str
    node: str


def minimal_conflict(
    annotated: Annotated, constraints: Constraints, objective: str, limited: bool, time_limit: float | None = None
) -> list[Requirement]:
    """A minimal set of the user's constraints that cannot hold together, each at one place.

    ``limited``: include the limits on memory and communication; these depend on paths, and so on ``objective``. After ``time_limit``
    seconds, returns the smallest conflicting set found so far.
    """
    requirements = _requirements(annotated, constraints, limited)
    until = None if time_limit is None else time.perf_counter() + time_limit
    holds = partial(_holds, annotated, objective if limited else "communication", until)
    if holds(requirements):
        return []
    user_text: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        user_text.setdefault(requirement.user_text, []).append(requirement)
    fewest = _minimal_subset(holds, list(user_text.values()))
    places = _minimal_subset(holds, [[requirement] for requirement in itertools.chain(*fewest)])
    return list({block[0].user_text: block[0] for block in reversed(places)}.values())[::-1]


def _requirements(annotated: Annotated, constraints: Constraints, limited: bool) -> list[Requirement]:
    returned = operands(annotated.graph.module.graph.output_node())
    found = [Requirement("value", name, one, one.user_text, name) for name, asked in constraints.values.items() for one in asked]
    found += [Requirement("result", k, one, one.user_text, returned[k].name) for k, asked in constraints.results.items() for one in asked]
    found += [Requirement("spec", name, spec, plan_pin_text(name, spec), name) for name, spec in constraints.specs.items()]
    found += [Requirement("read", name, one, one[1].user_text, name) for name, asked in constraints.reads.items() for one in asked]
    for one in constraints.equal:
        first, *others = one.places
        found += [Requirement("equal", None, Equality((first, other), one.user_text), one.user_text, other.node) for other in others]
    if limited:
        found += [Requirement("communication", None, limit, str(limit), "") for limit in constraints.communication]
    if limited and constraints.memory_limit is not None:
        found.append(Requirement("memory", None, constraints, f"memory_limit={constraints.memory_limit}", ""))
    return found


def _minimal_subset(holds: Callable[[Sequence[Requirement]], bool], blocks: list[list[Requirement]]) -> list[list[Requirement]]:
    """A minimal infeasible subset, by deletion: tries to leave out runs of blocks, halving their length."""
    size = len(blocks)
    while size:
        start = 0
        while start < len(blocks):
            fewer = blocks[:start] + blocks[start + size :]
            if holds([requirement for block in fewer for requirement in block]):
                start += size
            else:
                blocks = fewer
        size //= 2
    return blocks


def _constraints_from(requirements: Sequence[Requirement]) -> Constraints:
    values: dict[str, tuple[Condition, ...]] = {}
    results: dict[int, tuple[Condition, ...]] = {}
    for requirement in requirements:
        if requirement.kind in ("value", "result"):
            target: dict[Any, tuple[Condition, ...]] = values if requirement.kind == "value" else results
            target[requirement.key] = (*target.get(requirement.key, ()), requirement.wanted)
    specs = {w.key: w.wanted for w in requirements if w.kind == "spec"}
    equal, limits = (tuple(w.wanted for w in requirements if w.kind == kind) for kind in ("equal", "communication"))
    reads: dict[str, tuple[tuple[int, Condition], ...]] = {}
    for one in requirements:
        if one.kind == "read":
            reads[one.key] = (*reads.get(one.key, ()), one.wanted)
    found = Constraints(values, results, specs, equal=equal, communication=limits, reads=reads)
    memory = [w.wanted for w in requirements if w.kind == "memory"]
    if not memory:
        return found
    asked = memory[0]
    return dataclasses.replace(found, memory_limit=asked.memory_limit, optimizer=asked.optimizer, offload=asked.offload)


def _holds(annotated: Annotated, objective: str, until: float | None, requirements: Sequence[Requirement]) -> bool:
    """Whether any plan satisfies these requirements; True if neither the work limit nor the time ``until`` sufficed to tell."""
    left = None if until is None else until - time.perf_counter()
    if left is not None and left <= 0:
        return True
    try:
        made = formulate(annotated, _constraints_from(requirements), objective)
        solve_within((made.relaxed or made.problem).without_costs(), Budget(left, WORK_LIMIT, grace=0.0))
    except (InfeasibleError, ConstraintError):
        return False
    except NoPlanError:
        return True
    return True
