"""What other layouts would cost, as data for the report, and which values are worth asking about."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from fxshard.inspect.report.graph_data import GraphData, module_of_nodes, rounded
from fxshard.plans.comparison import signed
from fxshard.plans.explanation import Choice, Explanation
from fxshard.plans.plan_data import PlanData
from fxshard.views.words import cost_text

SHOWN = 8
"""Number of differences that are listed for a layout; the rest are counted."""
_NUMBER = re.compile(r"\d+")


def answers_data(answers: Iterable[Explanation], graph: GraphData) -> list[dict[str, Any]]:
    """One entry for each explained value: the node, the total of the plan, and every layout with its total and differences."""
    return [
        {
            "node": graph.nodes.get(one.node, -1),
            "name": one.name,
            "total": rounded(one.total),
            "choices": [_choice(one, choice) for choice in one.choices],
        }
        for one in answers
    ]


def _choice(answer: Explanation, choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = {"layout": choice.layout, "chosen": choice.chosen}
    more = answer.difference(choice)
    if choice.total is None or more is None:
        return said | {"reason": choice.reason}
    near = {answer.name, answer.node, *(r.node for r in answer.readings)}
    found = {} if choice.where is None else choice.where.differences()
    here = sum(value for name, value in found.items() if name in near)
    largest = sorted(found.items(), key=lambda one: -abs(one[1]))
    return said | {
        "total": rounded(choice.total),
        "text": cost_text(choice.total, answer.unit),
        "more": rounded(more),
        "more_text": signed(more, answer.unit),
        "gap": choice.gap,
        "cut": choice.cut,
        "here": signed(here, answer.unit),
        "elsewhere": signed(sum(found.values()) - here, answer.unit),
        "differences": [[name, name in near, signed(value, answer.unit)] for name, value in largest[:SHOWN]],
        "others": max(0, len(largest) - SHOWN),
    }


def costliest(plan: PlanData, count: int) -> list[str]:
    """The names of the ``count`` parameters and nodes with the highest cost, of values that are alike in several layers only the first.

    Counts a node's compute and the redistributions of its value, hidden ones too. Those of nodes that read a parameter, and of its
    gradient, count for the parameter, whose layout decides about them.
    """
    costs: dict[str, float] = defaultdict(float)
    kinds = plan.kinds
    owner = {node: next((name for name in read if kinds.get(name) == "parameter"), node) for node, read in plan.reads.items()}
    for node in plan.nodes:
        costs[owner.get(node.name, node.name)] += node.compute
    gradients = {k: end.name for k, end in enumerate(plan.outputs) if end.kind == "gradient"}
    inputs = {end.name: end.node for end in plan.inputs}
    last = plan.nodes[-1].name if plan.nodes else ""
    for entry in plan.redistributions:
        value = plan.picked.get(entry.value, (entry.value, 0))[0]
        names = [gradients[k] for node, k in entry.readers if node == last and k in gradients]
        costs[inputs.get(names[0], value) if names else owner.get(value, value)] += entry.cost + entry.hidden
    return _first_of_alike(plan, costs, count)


def _first_of_alike(plan: PlanData, costs: dict[str, float], count: int) -> list[str]:
    paths = module_of_nodes(plan)
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for node in _askable(plan):
        own = plan.called(node.name) if node.name in plan.kinds else node.op
        groups[_NUMBER.sub("*", own), _NUMBER.sub("*", paths[node.name]), str(node.shapes), str(node.spec)].append(node.name)
    ranked = sorted(groups.values(), key=lambda names: -sum(costs[name] for name in names))
    return [plan.called(names[0]) for names in ranked[:count] if sum(costs[name] for name in names) > 0]


def _askable(plan: PlanData) -> Sequence[Any]:
    """Nodes with one result that ``explain`` can ask about: those of second runs follow the first."""
    again = {new for names in plan.recomputed.values() for new in names}
    return [n for n in plan.nodes if len(n.spec.outputs) == 1 and n.op != "output" and n.name not in again]
