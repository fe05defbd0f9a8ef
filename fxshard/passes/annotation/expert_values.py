"""The nodes of a graph that may read rows on the ranks of their experts: those between ``to_experts`` and what ends such rows."""

from __future__ import annotations

from collections.abc import Mapping

from fxshard.graph.call import Call
from fxshard.graph.planning_graph import PlanningGraph, operands, planned_nodes, producer

START = "fxshard.to_experts.default"
END = "fxshard.from_experts.default"
ENDS = (END, "fxshard.expert_outer.default")
"""Their results are in the order of tokens, or the gradients of matrices."""


def expert_nodes(graph: PlanningGraph, calls: Mapping[str, Call]) -> frozenset[str]:
    """The names of these nodes, with those at both ends."""
    found, carriers = set[str](), set[str]()
    for node in planned_nodes(graph):
        call = calls.get(node.name)
        if call is None:
            continue
        if call.op == START:
            carriers.add(node.name)
        elif any(producer(o)[0].name in carriers for o in operands(node)):
            found.add(node.name)
            if call.op not in ENDS:
                carriers.add(node.name)
    return frozenset(found | carriers)


def expert_components(graph: PlanningGraph, calls: Mapping[str, Call]) -> list[list[str]]:
    """The same nodes, by mixture: those that pass rows on to each other, forward and backward, in the order of the graph."""
    import networkx as nx  # takes long, and only graphs with experts need it

    names = expert_nodes(graph, calls)
    found = nx.Graph()
    for node in planned_nodes(graph):
        if node.name in names:
            found.add_node(node.name)
            made = (producer(o)[0].name for o in operands(node))
            found.add_edges_from((name, node.name) for name in made if name in names and calls[name].op not in ENDS)
    place = {node.name: k for k, node in enumerate(planned_nodes(graph))}
    return sorted((sorted(one, key=place.__getitem__) for one in nx.connected_components(found)), key=lambda one: place[one[0]])
