"""The specs that a node may take under the user's constraints, and the errors where none is left."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import fx

from fxshard.errors import ConstraintError, count_text
from fxshard.graph.planning_graph import PlanningGraph, planned_nodes, producer, source_line
from fxshard.passes.annotation.annotate import Annotated, cuts_one_element
from fxshard.passes.planning.constrain import Constraints
from fxshard.passes.planning.names import some
from fxshard.passes.planning.patterns import Condition
from fxshard.plans.plan_data import OpSpec

Option = TypeVar("Option")
log = logging.getLogger("fxshard")


def admissible_specs(node: fx.Node, annotated: Annotated, constraints: Constraints) -> tuple[OpSpec, ...]:
    """The node's specs that its pins and the plan given as pins allow."""
    specs = annotated.specs[node.name]
    pins = [one for one in pins_of(node, constraints) if not _is_waived(*one, specs)]
    requirements = [(pin.user_text, _gives(pin, output)) for pin, output in pins]
    want = constraints.specs.get(node.name)
    for operand, pin in constraints.reads.get(node.name, ()):
        if not any(pin.admits(s.inputs[operand]) for s in specs):
            raise ConstraintError(
                f"{pin.user_text} cannot hold: {node.name} ({_op(node)}) never reads its operand {operand} in such a layout",
                where=user_location(node, annotated.graph),
                remedy=f"it can read {', '.join(sorted({str(s.inputs[operand]) for s in specs})[:12])}",
            )
        requirements.append((pin.user_text, partial(_reads, pin, operand)))
    if not requirements and want is None:
        return _sensible(node, annotated.graph, specs)
    for pin, output in pins:
        if not any(pin.admits(s.outputs[output]) for s in specs):
            gives = "always gives it" if pin.forbidden else "never gives that layout"
            raise ConstraintError(
                f"{pin.user_text} cannot hold: {node.name} ({_op(node)}) {gives}",
                where=user_location(node, annotated.graph),
                remedy=f"it can give {', '.join(sorted({str(s.outputs[output]) for s in specs})[:12])}",
            )
    if want is not None:
        if not any(_is_spec(want, s) for s in specs):
            raise ConstraintError(
                f"the plan gives {node.name} ({_op(node)}) the spec {want}, which is not legal",
                where=user_location(node, annotated.graph),
                remedy=f"legal ones are {'; '.join(str(s) for s in specs[:6])}",
            )
        requirements.append((plan_pin_text(node.name, want), partial(_is_spec, want)))
    kept = satisfying(specs, requirements, user_location(node, annotated.graph))
    return _sensible(node, annotated.graph, kept) or kept


def _sensible(node: fx.Node, graph: PlanningGraph, specs: tuple[OpSpec, ...]) -> tuple[OpSpec, ...]:
    """``specs`` without those that shard a dim of one element of a placeholder; a tangent has the layout of its result in any case."""
    if node.op != "placeholder" or all(size != 1 for size in node.meta["val"].shape):
        return specs
    kind = next(i.kind for i in graph.inputs if i.node == node.name)
    return tuple(spec for spec in specs if kind == "tangent" or not cuts_one_element(spec.outputs[0], node, batch=kind == "input"))


def satisfying(
    options: Sequence[Option], requirements: Sequence[tuple[str, Callable[[Option], bool]]], where: str | None
) -> tuple[Option, ...]:
    """The options that satisfy all requirements: pairs of the user's text and a predicate.

    Raises ConstraintError that names a smallest set of requirements that no option satisfies.
    """
    kept = tuple(o for o in options if all(holds(o) for _, holds in requirements))
    if kept:
        return kept
    sets = itertools.chain.from_iterable(itertools.combinations(requirements, n) for n in range(1, len(requirements) + 1))
    fewest = next(some for some in sets if not any(all(holds(o) for _, holds in some) for o in options))
    raise conflict_error([user_text for user_text, _ in fewest], where)


def conflict_error(user_text: Sequence[str], where: str | None) -> ConstraintError:
    """The error for constraints, in the user's words, that cannot hold together."""
    names = "; ".join(dict.fromkeys(user_text))
    return ConstraintError(f"these constraints cannot hold together: {names}", where=where, remedy="remove or change one of them")


def plan_pin_text(name: str, spec: object) -> str:
    """The name, in error messages, of a constraint that comes from a plan given as pins."""
    return f"{name}: {spec} of the plan given as pins"


def _gives(pin: Condition, output: int) -> Callable[[OpSpec], bool]:
    return lambda spec: pin.admits(spec.outputs[output])


def _reads(pin: Condition, operand: int, spec: OpSpec) -> bool:
    return pin.admits(spec.inputs[operand])


def _is_spec(want: OpSpec, spec: OpSpec) -> bool:
    return spec.outputs == want.outputs and (not want.inputs or spec.inputs == want.inputs)


def user_location(node: fx.Node, graph: PlanningGraph) -> str:
    """The user's source line of a node, or the user's name of an input."""
    return source_line(node) or next((f"{i.kind} {i.name}" for i in graph.inputs if i.node == node.name), f"node {node.name}")


def _is_waived(pin: Condition, output: int, specs: Sequence[OpSpec]) -> bool:
    """Whether a pin does not apply, because no spec gives such a layout."""
    return pin.optional and not any(pin.admits(s.outputs[output]) for s in specs)


def log_waived(annotated: Annotated, constraints: Constraints) -> None:
    """Logs the results of modules that cannot have the layout that a word for an axis says, so that the solver chooses another."""
    found: dict[str, list[str]] = {}
    for node in planned_nodes(annotated.graph):
        for pin, output in pins_of(node, constraints):
            if _is_waived(pin, output, annotated.specs[node.name]):
                text, _, name = pin.user_text.partition(" for ")
                found.setdefault(text, []).append(name)
    for text, names in found.items():
        what = "%s does not hold for %s, whose operators cannot give that layout; the solver chooses another: %s"
        log.warning(what, text, count_text(len(names), "result") + " of modules", some(names, 3))


def pins_of(node: fx.Node, constraints: Constraints) -> list[tuple[Condition, int]]:
    """(pin, output index) on the node or on its getitems."""
    pins = [(pin, pin.output) for pin in constraints.values.get(node.name, ())]
    for user in node.users:
        if producer(user)[0] is node and user is not node:
            pins += [(pin, producer(user)[1]) for pin in constraints.values.get(user.name, ())]
    return pins


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else {"placeholder": "an input"}.get(node.op, node.op)
