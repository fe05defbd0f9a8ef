"""Predicted timelines against ones computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard.cost.timeline import timeline
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def graph(early: bool) -> list[fx.Node]:
    """An all-reduce of 4000 bytes between two products. If ``early``, the wait comes after the second product, else at once."""
    g = fx.Graph()

    def made(target: object, *args: object, shape: tuple[int, ...] = (100, 10)) -> fx.Node:
        node = g.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    x = g.placeholder("x")
    x.meta["val"] = torch.empty(100, 10, device="meta")
    square = g.placeholder("square")
    square.meta["val"] = torch.empty(100, 50, device="meta")
    first = made(torch.ops.fxshard.einsum.default, square, x, "ab,ac->bc", shape=(50, 10))
    sent = made(c10d.all_reduce.default, x, "sum", "dp")
    if not early:
        wait = made(c10d.wait_tensor.default, sent)
    second = made(torch.ops.fxshard.einsum.default, square, x, "ab,ac->bc", shape=(50, 10))
    if early:
        wait = made(c10d.wait_tensor.default, sent)
    return [n for n in (first, sent, *((second, wait) if early else (wait, second)))]


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_overlap_of_a_collective_with_a_product(overlap: float) -> None:
    """Products take 2 x 100 x 50 x 10 FLOPs, 50 us at 2e9 a second. The all-reduce sends 4000 bytes on two ranks, 40 us."""
    rates = {4: 2e9}
    hardware = Hardware("toy", rates, 1e30, 0.0, 8, Link(1e8, 0.0), Link(1e8, 0.0), overlap=overlap)
    mesh = Mesh({"dp": 2}, hardware=hardware)
    at_once, late = timeline(graph(False), mesh), timeline(graph(True), mesh)
    assert at_once.total == pytest.approx(50 + 40 + 50)
    assert at_once.waited == pytest.approx(40) and at_once.computing == pytest.approx(100)
    assert late.total == pytest.approx(50 + 50 + (1 - overlap) * 40)
    assert late.waited == pytest.approx((1 - overlap) * 40)
