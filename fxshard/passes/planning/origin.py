"""Keeps the inputs and the solved problem of a plan in the process that made it, to answer questions that its data cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import fx

from fxshard.byte_sizes import size_text
from fxshard.errors import ConstraintError, PlanError
from fxshard.graph.planning_graph import is_getitem, operands, outputs_of, producer
from fxshard.layout.layouts import Layout, placement_str
from fxshard.memory_profile import MemoryProfile
from fxshard.mesh.price_draws import Errors
from fxshard.passes.annotation.annotate import Annotated
from fxshard.passes.annotation.recompute import expanded
from fxshard.passes.memory.planned_memory import planned_profile
from fxshard.passes.planning.choose import allowance, decide, keeps_limit, solve_without_memory_limit, solved
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.formulate import formulate
from fxshard.passes.planning.formulation import Formulation
from fxshard.passes.planning.names import Names, Place
from fxshard.passes.planning.patterns import Condition, on_several_ranks, read_pattern
from fxshard.passes.planning.price_regret.regret import regret
from fxshard.passes.planning.sizes_of_plan import holds_up_to, plan_at
from fxshard.plans.comparison import compare
from fxshard.plans.explanation import Choice, Explanation, Reading
from fxshard.plans.plan_at import PlanAt
from fxshard.plans.price_regret import PriceRegret
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.solver import InfeasibleError, NoPlanError, Solution, Solved

NEAR = 1e-4
"""Relative gap at which an answer is good enough: most answers close the gap entirely, and the rest would take as long as planning itself.
Answers may have a larger gap if the plan has one."""


@dataclass(frozen=True)
class _Value:
    """The value that a question is about: the layout in each state of its variable, and all layouts that its operator allows."""

    name: str
    node: str
    output: int
    op: str
    ndim: int
    variable: int
    layouts: tuple[Layout, ...]
    legal: tuple[Layout, ...]
    together: bool


class Origin:
    """The annotated graph, constraints and solved problem of a plan; ``cached``: the file that the plan was read from, if any."""

    def __init__(
        self,
        annotated: Annotated,
        constraints: Constraints,
        objective: str,
        time_limit: float | None,
        formulation: Formulation | None = None,
        session: Solved | None = None,
        cached: Path | None = None,
    ) -> None:
        self.annotated, self.constraints, self._time_limit = annotated, constraints, time_limit
        self._formulation, self._session, self.cached = formulation, session, cached
        self._asked = annotated, constraints, objective
        self._at: dict[tuple[tuple[str, int], ...], PlanAt] = {}
        self._within: tuple[Formulation, Solved] | None = None

    def explain(self, plan: ShardingPlan, name: str, layout: Any = None) -> Explanation:
        """As ``ShardingPlan.explain``."""
        value = self.value(name)
        have = self._layout_in_plan(plan, value)
        if layout is None:
            pins = [Condition(tuple(found), str(found)) for found in dict.fromkeys((*value.legal, have))]
        else:
            said = read_pattern(layout, plan.mesh, value.ndim, f"{name!r} ({value.node})")
            pins = [Condition(on_several_ranks(said, plan.mesh), _pattern_text(said))]
        choices = [self._choice(plan, value, have, pin) for pin in pins]
        choices.sort(key=lambda c: (c.total is None, c.total or 0.0, not c.chosen, c.layout))
        node = next((n for n in plan.nodes if n.name == value.node), None)
        return Explanation(
            name=name,
            node=value.node,
            op=value.op,
            line=plan.lines.get(value.node, ""),
            layout=have,
            compute=node.compute if node else 0.0,
            total=plan.objective,
            unit=plan.certificate.unit,
            readings=tuple(self._readings(plan, value)),
            choices=tuple(choices),
        )

    def memory_profile(self, plan: ShardingPlan) -> MemoryProfile:
        """As ``ShardingPlan.memory_profile``."""
        times = expanded(self.annotated.at_memory_sizes, plan.recomputed).times
        return planned_profile(times, plan.specs, plan.redistributions, plan.mesh, self.constraints.optimizer, plan.on_host)

    def at(self, plan: ShardingPlan, sizes: Mapping[str, int]) -> PlanAt:
        """As ``ShardingPlan.at``."""
        key = tuple(sorted(sizes.items()))
        if key not in self._at:
            self._at[key] = plan_at(plan, *self._asked, self._time_limit, sizes)
        return self._at[key]

    def regret(self, plan: ShardingPlan, error: Errors, draws: int) -> PriceRegret:
        """As ``ShardingPlan.regret``."""
        start = () if self._session is None else self._session.solution.choices
        return regret(plan, self.annotated, self.constraints, self._time_limit, error, draws, start)

    def holds_up_to(self, plan: ShardingPlan) -> Mapping[str, int | None]:
        """As ``ShardingPlan.holds_up_to``."""
        return holds_up_to(plan, self.annotated, self.constraints)

    def module_of(self, node: str) -> str | None:
        """As ``sharding_plan.Origin.module_of``."""
        calls = self.annotated.graph.returned.items()
        return min((name for name, found in calls if found == ((node,),)), key=len, default=None)

    def _problem(self) -> tuple[Formulation, Solved]:
        """The problem and its solve, redone for a plan from the cache; without the memory limit if that suffices to keep it."""
        if self._session is None:
            free = None if self.constraints.memory_limit is None else solve_without_memory_limit(*self._asked, allowance(self._time_limit))
            self._formulation, self._session = self._limited() if free is None or not keeps_limit(free[0]) else free[1:]
        assert self._formulation is not None
        return self._formulation, self._session

    def _limited(self) -> tuple[Formulation, Solved]:
        """The problem with the memory limit; solved only when an answer without the limit exceeds it."""
        if self._within is None:
            formulation = formulate(*self._asked)
            self._within = formulation, solved(self.annotated, self.constraints, formulation, allowance(self._time_limit, limited=True))
        return self._within

    def value(self, name: str) -> _Value:
        return self._value(name, self._problem()[0])

    def _value(self, name: str, formulation: Formulation) -> _Value:
        graph, place = self.annotated.graph, self._place(name)
        if place.result is not None:
            variable, layouts = formulation.result_vars[place.result]
            ndim = operands(graph.module.graph.output_node())[place.result].meta["val"].dim()
            return _Value(name, "output", place.result, "output", ndim, variable, layouts, tuple(layouts), False)
        source, picked = producer(graph.by_name[place.node])
        output = place.output if source.name == place.node else picked
        variable, specs = formulation.node_vars[source.name]
        own = self.annotated.specs[source.name]
        together = sum(var == variable for var, _ in formulation.node_vars.values()) > 1
        tensor = outputs_of(source)[output]
        assert tensor is not None
        return _Value(
            name,
            source.name,
            output,
            str(source.target) if source.op == "call_function" else next(i.kind for i in graph.inputs if i.node == source.name),
            tensor.dim(),
            variable,
            tuple(spec.outputs[output] for spec in specs),
            tuple(dict.fromkeys(spec.outputs[output] for spec in own)),
            together,
        )

    def _place(self, name: str) -> Place:
        try:
            names = Names(self.annotated.graph)
            if names.names_inputs(name):
                what = f"{name!r} has no layout of its own: it stands for values that others read too"
                raise PlanError(
                    what,
                    where=f"plan on mesh {self.annotated.mesh}",
                    remedy="name the value; inspect.nodes_table(plan) lists them",
                )
            return names.one(name, f"plan on mesh {self.annotated.mesh}")
        except ConstraintError as error:
            raise PlanError(error.what, where=error.where, remedy=error.remedy) from error

    def _layout_in_plan(self, plan: ShardingPlan, value: _Value) -> Layout:
        spec = plan.specs[value.node]
        return spec.inputs[value.output] if value.node == "output" else spec.outputs[value.output]

    def _choice(self, plan: ShardingPlan, value: _Value, have: Layout, pin: Condition) -> Choice:
        if pin.admits(have):
            return Choice(pin.user_text, plan.objective, plan.lower_bound, True, plan.certificate.cut, plan=plan)
        other = self._answer(value, pin, *self._problem())
        limit = self.constraints.memory_limit
        if limit is not None and isinstance(other, ShardingPlan) and sum(other.memory.values()) > limit:
            try:
                formulation, session = self._limited()
            except ConstraintError as error:
                return Choice(pin.user_text, None, None, reason=f"no plan that has it was found within memory_limit: {error.what}")
            other = self._answer(self._value(value.name, formulation), pin, formulation, session)
        if isinstance(other, str):
            return Choice(pin.user_text, None, None, reason=other)
        bound, cut = other.lower_bound, other.certificate.cut
        return Choice(pin.user_text, other.objective, bound, cut=cut, plan=other, where=compare(plan, other))

    def _answer(self, value: _Value, pin: Condition, formulation: Formulation, session: Solved) -> ShardingPlan | str:
        """The best plan with the pin, or the reason why there is none."""
        allowed = np.asarray([pin.admits(layout) for layout in value.layouts])
        if not allowed.any():
            return _impossible(value, pin)
        try:
            solution = session.again({value.variable: allowed}, NEAR, deep=False)
        except (InfeasibleError, NoPlanError) as error:
            return _no_plan(error)
        return self._plan_of(formulation, solution)

    def _plan_of(self, formulation: Formulation, solution: Solution) -> ShardingPlan:
        limited = formulation.problem.usage_limit is not None
        constraints = self.constraints if limited else replace(self.constraints, memory_limit=None)
        try:
            plan = decide(self.annotated, constraints, formulation, solution)
        except ConstraintError as error:
            raise PlanError(f"the plan could not be written: {error.what}", where=error.where, remedy="please report it") from error
        return replace(plan, memory_limit=self.constraints.memory_limit)

    def _readings(self, plan: ShardingPlan, value: _Value) -> Iterable[Reading]:
        if value.node == "output":
            return
        graph = self.annotated.graph
        costs = {reader: r.cost for r in plan.redistributions for reader in r.readers}
        lines = plan.lines
        for name in _value_names(graph.by_name[value.node], value.output):
            for user in graph.by_name[name].users:
                for k, operand in enumerate(operands(user)):
                    if operand.name == name:
                        layout = plan.specs[user.name].inputs[k]
                        end = graph.outputs[k] if user.op == "output" else None
                        what = str(user.target) if end is None else f"{end.kind} {end.name}"
                        yield Reading(user.name, what, layout, costs.get((user.name, k), 0.0), lines.get(user.name, ""))


def _value_names(node: fx.Node, output: int) -> list[str]:
    """The names of the values that hold one output of a node: its getitems, or the node itself."""
    picks = [user.name for user in node.users if is_getitem(user) and producer(user) == (node, output)]
    return picks or [node.name]


def _no_plan(error: Exception) -> str:
    if isinstance(error, InfeasibleError) and error.least_usage is not None and error.row is None:
        return f"no plan has it within memory_limit: the least found takes {size_text(error.least_usage)}"
    return f"no plan has it: {error}" if isinstance(error, InfeasibleError) else str(error)


def _impossible(value: _Value, pin: Condition) -> str:
    if not any(map(pin.admits, value.legal)):
        return f"{value.op} never gives it"
    if value.together:
        return f"{value.node} is decided together with other pieces of its operator, which never give it; pins={{...}} separate them"
    return "the pins of this plan exclude it"


def _pattern_text(wanted: Iterable[Any]) -> str:
    return "".join("*" if p is None else placement_str(p) for p in wanted)
