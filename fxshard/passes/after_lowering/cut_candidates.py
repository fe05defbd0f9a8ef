"""Finds the operators around a collective that can run piecewise: those that compute its input and those that read its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from fxshard.graph.planning_graph import operands
from fxshard.passes.after_lowering.follow_cut import Cut, made, merged, read
from fxshard.passes.after_lowering.forward_backward import by_order, forward_nodes
from fxshard.passes.after_lowering.schedule import is_light
from fxshard.program.sharded_program import KINDS, ShardedProgram

PRODUCT = torch.ops.fxshard.einsum.default
"""The operator that stands for every matrix product."""

Cuts = Mapping[fx.Node, Cut]


@dataclass(frozen=True)
class Halves:
    """The nodes of a local graph that run in the forward, including any inserted there later. ``tangents``: if the graph's order decides
    where the backward begins, the tangents, whose first reader marks it."""

    first: set[fx.Node]
    tangents: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(cls, program: ShardedProgram, graph: fx.Graph) -> Halves:
        given = [n for n in graph.nodes if n.op == "placeholder"]
        late = [n for n, end in zip(given, program.inputs, strict=True) if end.kind == "tangent"] if by_order(program) else []
        return cls(forward_nodes(program, graph), frozenset(late))

    def together(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether ``a`` may move to ``b``: both are in the same half, and ``a`` reads none of ``tangents``."""
        return (a in self.first) == (b in self.first) and self.tangents.isdisjoint(a.all_input_nodes)


def collective_cuts(node: fx.Node, dim: int, count: int) -> tuple[Cut, Cut] | None:
    """The cuts of a collective's input and result into ``count`` pieces along a dim of its buffer; None if the dim has too few elements.

    If the dim has a block per rank, each piece has a part of every block.
    """
    if KINDS[node.target] in ("dispatch", "combine"):  # data decides which rows a rank sends
        return None
    kind, size = KINDS[node.target], node.all_input_nodes[0].meta["val"].shape[dim]
    ranks = next((a for a in node.args[1:] if type(a) is int), 1)
    if kind in ("all_to_all", "zigzag") and dim == 0:  # dim 0 counts blocks
        return None
    sent, arrived = (ranks if kind == own and dim == 0 else 1 for own in ("reduce_scatter", "all_gather"))
    return None if size // sent < count else _collective_cuts(dim, size // sent, count, sent, arrived)


@lru_cache(maxsize=256)
def _collective_cuts(dim: int, size: int, count: int, sent: int, arrived: int) -> tuple[Cut, Cut]:
    """The same cuts, cached for equal collectives."""
    labels = (torch.arange(size) * count // size).to(torch.int16)
    return Cut(dim, labels.repeat(sent)), Cut(dim, labels.repeat(arrived))


def producers(collective: fx.Node, cut: Cut, count: int, halves: Halves) -> Cuts:
    """The operators, back to matrix products, that only serve to compute a collective's input, with their cuts; empty without a product."""
    (buffer,) = collective.all_input_nodes
    asked: dict[fx.Node, Cut | None] = {buffer: cut}
    found: dict[fx.Node, Cut] = {}
    todo = {buffer}
    while todo:
        node = max(todo)  # the last one: all its readers have been visited
        todo.remove(node)
        whole = asked[node]
        reads = None if whole is None or node.op != "call_function" else read(node, whole)
        alone = all(user is collective or user in found for user in node.users)
        if whole is None or reads is None or not alone or not halves.together(node, collective):
            continue
        found[node] = whole
        if node.target is PRODUCT:
            continue
        for operand, own in zip(operands(node), reads, strict=True):
            if operand not in asked:
                todo.add(operand)
                asked[operand] = own
            else:
                before = asked[operand]
                asked[operand] = None if before is None or own is None else merged(before, own)
    return _led_by_products(found, count) if _agrees(found) else {}


def _agrees(found: Cuts) -> bool:
    """Whether every operator reads exactly the pieces that its operands produce; slices may read less."""
    for node, cut in found.items():
        reads = read(node, cut) if node.target not in (PRODUCT, torch.ops.aten.slice.Tensor) else None
        if any(own is not None and o in found and not found[o].same(own) for o, own in zip(operands(node), reads or (), strict=False)):
            return False
    return True


def _led_by_products(found: Cuts, count: int) -> Cuts:
    """The nodes that depend on a product; empty if a product would have an empty piece."""
    kept: dict[fx.Node, Cut] = {}
    for node in sorted(found):
        if node.target is PRODUCT or any(o in kept for o in operands(node)):
            kept[node] = found[node]
    return kept if _full(kept, count) else {}


def _full(cuts: Cuts, count: int) -> bool:
    return all(cut.count(k) for node, cut in cuts.items() if node.target is PRODUCT for k in range(count))


def readers(wait: fx.Node, cut: Cut, count: int, halves: Halves) -> Cuts:
    """The products, and the light operators before them, that can run on pieces of the result, and the wait itself; empty without a
    product.

    Products run piecewise at the position of the first of them; operators with an operand that is not yet available there are left out.
    """
    found: dict[fx.Node, Cut] = {wait: cut}
    products: list[fx.Node] = []
    todo = set(wait.users)
    while todo:
        node = min(todo)
        todo.remove(node)
        if not (node.target is PRODUCT or is_light(node)) or not halves.together(node, wait):
            continue
        if products and any(o in products or (o not in found and not o < products[0]) for o in operands(node)):
            continue  # not yet available where the products run
        own = made(node, {o: found[o] for o in operands(node) if o in found})
        if own is None:
            continue
        if node.target is PRODUCT:
            products.append(node)
        else:
            todo.update(node.users)
        found[node] = own
    needed = set(products)
    for node in sorted(found, reverse=True):
        if node in needed:
            needed.update(o for o in operands(node) if o in found)
    kept = {n: c for n, c in found.items() if n in needed}
    return kept if products and _full(kept, count) else {}
