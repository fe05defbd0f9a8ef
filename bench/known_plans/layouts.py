"""The layouts that make a known plan, as pins: weights by what they are, the residual stream forward and backward, the loss.

Everything else is left to the solver. What a paper says of a plan is bound so far that nothing cheaper is left within it; where the
plan found freely is cheaper, ``fxshard.diff`` of the two says by what.
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
    """Layouts as text, one placement an axis; None where the rest decides.

    ``columns``: of weights whose outputs a block cuts (q, k, v, the feed-forward's first), ``rows``: of those whose inputs it cuts;
    ``norms``, ``tables`` (embedding and head); ``stream``: [batch, length, H] between the blocks, its gradients, and what norms give;
    ``added``: what attention and feed-forward give, to be added to it; ``learned``: gradients of the norms' weights where they are
    computed; ``embedded``: what the embedding gives; ``statistics``: of the loss, [tokens] (P for the maximum too); ``sums``: its
    two sums over tokens; ``looked_up``: the gradient of the embedding's table where it is computed.
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
        """By the names of parameters and nodes of a Llama's training graph."""
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
    """Sums of two tensors of its shape, but for those of products: what each rank has of these is still to be summed over ranks.

    And what goes into the first products of a block: the results of norms.
    """
    if str(node.target) == "aten.add.Tensor":
        return _shape(node) == _stream_shape(graph) and not _is_product(node)
    return _returned(graph, node, "norm")


def _returned(graph: PlanningGraph, node: fx.Node, *modules: str) -> bool:
    """Whether it is what a module gives whose name ends so."""
    return any(node.name in call for name, calls in graph.returned.items() if name.endswith(modules) for call in calls)


def _is_product(node: fx.Node) -> bool:
    """A matrix product, or a sum of such."""
    if str(node.target) == "aten.add.Tensor":
        return all(_is_product(o) for o in operands(node))
    return str(node.target) == "fxshard.einsum.default"


def _stream_shape(graph: PlanningGraph) -> tuple[int, ...]:
    return next(_shape(node) for node in graph.nodes if str(node.target) == "aten.embedding.default")


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
