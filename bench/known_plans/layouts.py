"""The layouts of a known plan, as pins on weights by their role, on the residual stream forward and backward, and on the loss.

The solver chooses everything else. The pins are strict enough that the cheapest plan within them is the paper's. If the plan found without
pins is cheaper, ``fxshard.diff`` of the two shows why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from torch import fx

from fxshard.graph.planning_graph import PlanningGraph, operands

COLUMNS = ("layers.*.attention.w[qkv].weight", "layers.*.feed_forward.w[13].weight")
ROWS = ("layers.*.attention.wo.weight", "layers.*.feed_forward.w2.weight")


@dataclass(frozen=True)
class KnownLayouts:
    """Layouts as text, one placement per axis; None leaves the layout to the solver.

    Weights: ``columns``: those that tensor parallelism shards by outputs (q, k, v, the feed-forward's first two), ``rows``: those that it
    shards by inputs (the last ones), ``norms``, ``tables`` (embedding and head). Values: ``stream``: the residual stream [batch, length,
    H], its gradients, and the results of norms; ``added``: the results of attention and feed-forward, which are added to it; ``learned``:
    the gradients of the norms' weights, as computed; ``embedded``: the result of the embedding; ``statistics``: those of the loss, [tokens]
    (P means P(max) for the maximum); ``sums``: the loss's two sums over tokens; ``looked_up``: the gradient of the embedding's table, as
    computed.
    """

    columns: str
    rows: str
    norms: str
    tables: str
    stream: str
    added: str | None = None
    learned: str | None = None
    embedded: str | None = None
    statistics: str | None = None
    sums: str | None = None
    looked_up: str | None = None

    def pins(self, graph: PlanningGraph) -> dict[str, str]:
        """Name of a parameter or node of a Llama's training graph -> its layout."""
        roles = {**dict.fromkeys(COLUMNS, self.columns), **dict.fromkeys(ROWS, self.rows), "*norm.weight": self.norms, "*": self.tables}
        names = [end.name for end in graph.inputs_of("parameter")]
        pins = {name: next(layout for role, layout in roles.items() if fnmatch(name, role)) for name in names}
        return pins | dict(self._pinned_nodes(graph))

    def _pinned_nodes(self, graph: PlanningGraph) -> Iterator[tuple[str, str]]:
        statistics = self.statistics
        by_operator = {
            "aten.embedding.default": self.embedded,
            "aten.embedding_dense_backward.default": self.looked_up,
            "aten.amax.default": statistics and statistics.replace("P", "P(max)"),
            "fxshard.sum_exp.default": statistics,
            "fxshard.target_score.default": statistics,
            "aten.sum.default": self.sums,
        }
        if self.learned is not None:
            returned = operands(graph.module.graph.output_node())
            ends = zip(graph.outputs, returned, strict=True)
            yield from ((node.name, self.learned) for end, node in ends if end.kind == "gradient" and end.name.endswith("norm.weight"))
        for node in graph.nodes:
            layout = self.stream if _in_stream(graph, node) else by_operator.get(str(node.target))
            layout = self.added if _returned(graph, node, "attention", "feed_forward") else layout
            if layout is not None:
                yield node.name, layout


def _in_stream(graph: PlanningGraph, node: fx.Node) -> bool:
    """Whether the node is part of the residual stream, or the result of a norm.

    Additions of the stream's shape are part of it, except those that only add up matrix products, which may still be partial sums.
    """
    if str(node.target) == "aten.add.Tensor":
        return _shape(node) == _stream_shape(graph) and not _is_product(node)
    return _returned(graph, node, "norm")


def _returned(graph: PlanningGraph, node: fx.Node, *modules: str) -> bool:
    """Whether the node is the result of a module whose name ends with one of ``modules``."""
    return any(node.name in call for name, calls in graph.returned.items() if name.endswith(modules) for call in calls)


def _is_product(node: fx.Node) -> bool:
    """Whether the node is a matrix product, or a sum of matrix products."""
    if str(node.target) == "aten.add.Tensor":
        return all(_is_product(o) for o in operands(node))
    return str(node.target) == "fxshard.einsum.default"


def _stream_shape(graph: PlanningGraph) -> tuple[int, ...]:
    return next(_shape(node) for node in graph.nodes if str(node.target) == "aten.embedding.default")


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
