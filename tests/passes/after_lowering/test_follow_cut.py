"""Cuts propagated through operators: a piece of the result does not depend on the operands outside their pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxshard.graph.planning_graph import operands
from fxshard.passes.after_lowering.follow_cut import UNREAD, Cut, made, read

aten, einsum = torch.ops.aten, torch.ops.fxshard.einsum.default

CALLS: list[tuple[Any, list[tuple[int, ...]], tuple[Any, ...]]] = [
    (einsum, [(4, 6, 3), (5, 3)], ("abk,ck->abc",)),
    (einsum, [(4, 3), (3, 6)], ("ak,kb->ba",)),
    (aten.add.Tensor, [(4, 6), (6,)], ()),
    (aten.view.default, [(4, 6, 2)], ([24, 2],)),
    (aten.view.default, [(12, 2)], ([4, 3, 2],)),
    (aten.permute.default, [(4, 6, 2)], ([2, 0, 1],)),
    (aten.expand.default, [(1, 6)], ([4, 6],)),
    (aten.slice.Tensor, [(8, 6)], (0, 2, 7)),
    (aten.slice.Tensor, [(8, 6)], (-1, -4, 9223372036854775807)),
    (aten.constant_pad_nd.default, [(4, 5)], ([0, 1, 2, 0], 0)),
    (aten.select.int, [(3, 4, 6)], (0, 1)),
    (aten.unsqueeze.default, [(4, 6)], (0,)),
]


def node_of(target: Any, shapes: list[tuple[int, ...]], rest: tuple[Any, ...], listed: bool = False) -> fx.Node:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{k}") for k in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.randn(shape, dtype=torch.float64)
    node = graph.call_function(target, ((given, *rest) if listed else (*given, *rest)))
    node.meta["val"] = run(node, [n.meta["val"] for n in given])
    return node


def run(node: fx.Node, values: list[Tensor]) -> Tensor:
    by_node = dict(zip(operands(node), values, strict=True))
    result: Tensor = node.target(*fx.map_arg(node.args, by_node.__getitem__))  # type: ignore[operator]  # calls have operators as targets
    return result


def spoilt(value: Tensor, cut: Cut | None, piece: int) -> Tensor:
    """The value with other numbers outside the piece."""
    if cut is None:
        return value
    shape = [-1 if d == cut.dim else 1 for d in range(value.ndim)]
    return torch.where((cut.labels == piece).reshape(shape), value, 1e3)


def check(node: fx.Node) -> int:
    """Cuts each dim of the result in two; returns how many dims can be cut."""
    found, values = 0, [o.meta["val"] for o in operands(node)]
    for dim, size in enumerate(node.meta["val"].shape):
        cut = Cut(dim, torch.arange(size) * 2 // size)
        reads = read(node, cut)
        if reads is None or not any(reads):
            continue
        found += 1
        for piece in range(2):
            result = run(node, [spoilt(v, c, piece) for v, c in zip(values, reads, strict=True)])
            here = (cut.labels == piece).nonzero().flatten()
            assert torch.equal(result.index_select(dim, here), node.meta["val"].index_select(dim, here))
        back = made(node, {o: c for o, c in zip(operands(node), reads, strict=True) if c is not None})
        whole = all(c is None or not bool((c.labels == UNREAD).any()) for c in reads)
        if whole and node.target is not aten.constant_pad_nd.default:
            assert back is not None and back.same(cut)
    return found


@pytest.mark.parametrize(("target", "shapes", "rest"), CALLS, ids=str)
def test_a_piece_depends_only_on_pieces_of_the_operands(target: Any, shapes: list[tuple[int, ...]], rest: tuple[Any, ...]) -> None:
    assert check(node_of(target, shapes, rest))


@pytest.mark.parametrize("dim", [0, 1])
def test_concatenation_along_either_dim(dim: int) -> None:
    assert check(node_of(aten.cat.default, [(4, 6), (4, 6), (4, 6)], (dim,), listed=True)) == 2


def test_reduced_and_scanned_dims_are_not_cut() -> None:
    product = node_of(einsum, [(4, 3), (3, 6)], ("ak,kb->ab",))
    rows, columns = operands(product)
    assert made(product, {rows: Cut(1, torch.tensor([0, 0, 1])), columns: Cut(0, torch.tensor([0, 0, 1]))}) is None
    assert read(node_of(aten.sum.dim_IntList, [(4, 6)], ([0], True)), Cut(0, torch.tensor([0]))) is None
    scanned = node_of(aten.cumsum.default, [(4, 6)], (0,))
    assert read(scanned, Cut(0, torch.tensor([0, 0, 1, 1]))) is None and read(scanned, Cut(1, torch.arange(6) // 3)) is not None
