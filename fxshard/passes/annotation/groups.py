"""Groups of nodes that form one variable of the optimisation problem: an operator that was traced as several nodes.

The nodes of a group read a value from outside in one layout, and pass values to each other unchanged, or reduced if they are pending.
This removes short cycles from the problem (a norm's sum, its spread and the normalisation all read x), on which the solver's bounds
would be loose. The plan still lists every node with its own spec, and every collective between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import fx
from torch.distributed.tensor import Partial, Replicate

from fxshard.graph.planning_graph import PlanningGraph, operands, planned_nodes, producer
from fxshard.graph.targets import name_of
from fxshard.layout.layouts import Layout
from fxshard.plans.plan_data import OpSpec


@dataclass(frozen=True)
class Family:
    """Operators whose nodes form a group if connected; a group ends at the ``final`` operator.

    ``feeders`` belong to it if only its nodes read them. ``siblings``: nodes with the same first two operands belong together as well.
    """

    members: frozenset[str]
    final: str
    feeders: frozenset[str] = frozenset()
    siblings: bool = False


def _family(members: str, feeders: str = "", siblings: bool = False) -> Family:
    """A family of fxshard operators, given by names; the last one is final."""
    names = [f"fxshard.{m}.default" for m in members.split()]
    return Family(frozenset(names), names[-1], frozenset(feeders.split()), siblings)


FAMILIES = (
    _family("row_sum row_mean row_spread row_rstd row_normalise"),
    _family("row_norm_sums row_norm_weight row_norm_backward", siblings=True),
    _family("channel_sum channel_spread batch_statistics running_statistics normalise"),
    _family("sum_exp softmax", "aten.amax.default"),
    _family("sum_product softmax_backward"),
)

MAX_STATES = 2_000
"""Maximum number of joint states of a group; with more, its nodes stay separate variables."""

Source = tuple[int, int, bool]
"""An operand: (member, output, whether only members read it), or (-1, index of the value from outside, False)."""


@dataclass(frozen=True)
class Group:
    """``nodes`` in graph order; ``sources``: the operands of each."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[tuple[Source, ...], ...]


def groups(graph: PlanningGraph, free: Callable[[fx.Node], bool]) -> tuple[Group, ...]:
    """The groups of a graph, in graph order; only those whose nodes are all ``free`` to be grouped."""
    found: dict[fx.Node, list[fx.Node]] = {}
    nodes = planned_nodes(graph)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        for operand in operands(node):
            readers.setdefault(producer(operand)[0], []).append(node)
    ops = {n: _op(n) for n in nodes}
    for family in FAMILIES:
        inside = {n for n in nodes if ops[n] in family.members}
        inside |= {n for n in nodes if ops[n] in family.feeders and n in readers and all(r in inside for r in readers[n])}
        first: dict[tuple[fx.Node, ...], fx.Node] = {}
        for node in nodes:
            if node in inside:
                _merge(found, node, [s for s, _ in map(producer, operands(node)) if s in inside and _op(s) != family.final])
                if family.siblings:
                    _merge(found, node, [_sibling(node, first)])
    parts = {id(part): part for part in found.values() if len(part) > 1 and all(map(free, part))}
    order = {node: k for k, node in enumerate(nodes)}
    return tuple(_group(sorted(part, key=order.__getitem__), readers) for part in parts.values())


def joint_specs(group: Group, specs: Mapping[str, tuple[OpSpec, ...]]) -> tuple[tuple[int, ...], ...]:
    """The joint states of a group, each as one spec index per node. The state of all first specs comes first. Empty if
    there are more than ``MAX_STATES``."""
    return _joint(group.sources, tuple(specs[n.name] for n in group.nodes))


def internal_redistributions(group: Group, chosen: Sequence[OpSpec]) -> list[tuple[int, int, Layout]]:
    """(member, output, layout) of every value that is redistributed between members, each once, in order."""
    moves: dict[tuple[int, int, Layout], None] = {}
    for spec, sources in zip(chosen, group.sources, strict=True):
        for want, (member, output, _) in zip(spec.inputs, sources, strict=True):
            if member >= 0 and chosen[member].outputs[output] != want:
                moves[member, output, want] = None
    return list(moves)


@lru_cache(maxsize=256)
def _joint(sources: tuple[tuple[Source, ...], ...], specs: tuple[tuple[OpSpec, ...], ...]) -> tuple[tuple[int, ...], ...]:
    states: list[tuple[tuple[int, ...], dict[int, Layout]]] = [((), {})]
    for member, options in enumerate(specs):
        states = [
            ((*chosen, k), seen)
            for chosen, before in states
            for k, spec in enumerate(options)
            if (seen := _merged_layouts(spec, sources[member], [specs[m][i] for m, i in enumerate(chosen)], before)) is not None
        ]
        if len(states) > MAX_STATES:
            return ()
    return tuple(chosen for chosen, _ in states)


def _merged_layouts(spec: OpSpec, sources: Sequence[Source], chosen: Sequence[OpSpec], seen: dict[int, Layout]) -> dict[int, Layout] | None:
    """The layouts of the values from outside, including those that ``spec`` reads; None if it is incompatible with the specs ``chosen``."""
    seen = dict(seen)
    for want, (member, output, inner) in zip(spec.inputs, sources, strict=True):
        if member < 0:
            if seen.setdefault(output, want) != want:
                return None
        elif not _can_pass(chosen[member].outputs[output], want, inner):
            return None
    return seen


def _can_pass(have: Layout | None, want: Layout, inner: bool) -> bool:
    """Whether a value can pass between members: unchanged, or reduced if only members read it. A reader outside might reduce it too, and
    the cost would be counted twice."""
    if have is None or have == want:
        return have == want
    return inner and all(a == b or (isinstance(a, Partial) and isinstance(b, Replicate)) for a, b in zip(have, want, strict=True))


def _sibling(node: fx.Node, first: dict[tuple[fx.Node, ...], fx.Node]) -> fx.Node:
    """The first node that reads the same gradient and value; for a sum of the gradient alone (a bias), the first that reads it."""
    values = tuple(operands(node)[:2])
    other = first.setdefault(values, first.get(values, node))
    first.setdefault(values[:1], node)
    return other


def _merge(found: dict[fx.Node, list[fx.Node]], node: fx.Node, others: list[fx.Node]) -> None:
    """Merges a node's part with the parts of ``others``."""
    part = found.setdefault(node, [node])
    for other in others:
        theirs = found[other]
        if theirs is not part:
            part += theirs
            found |= dict.fromkeys(theirs, part)


def _group(nodes: list[fx.Node], readers: Mapping[fx.Node, list[fx.Node]]) -> Group:
    outside: dict[tuple[fx.Node, int], int] = {}
    sources = []
    for node in nodes:
        row: list[Source] = []
        for operand in operands(node):
            source, output = producer(operand)
            if source in nodes:
                row.append((nodes.index(source), output, all(r in nodes for r in readers[source])))
            else:
                row.append((-1, outside.setdefault((source, output), len(outside)), False))
        sources.append(tuple(row))
    return Group(tuple(nodes), tuple(sources))


def _op(node: fx.Node) -> str:
    return name_of(node.target) if node.op == "call_function" else node.op
