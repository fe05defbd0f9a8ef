"""The objective of a plan, recounted from the local graph of its program: products by local shapes, collectives by buffers."""

from __future__ import annotations

import math

import pytest
from equality import prepared
from torch import fx

from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.program.sharded_program import SHIFT, ZIGZAG, is_collective
from fxshard.testing.random_plan import random_graph_plan

RATE, BANDWIDTH = 1e9, 1e8
IDEAL = Hardware("ideal", {8: RATE}, 1e30, 0.0, 64, Link(BANDWIDTH, 0.0), Link(BANDWIDTH, 0.0))
"""No launch time, no latency, free memory traffic: a product costs its FLOPs, a collective the bytes that a rank sends."""
EINSUM = "fxshard.einsum.default"


def product(node: fx.Node) -> float:
    """Microseconds of an einsum: two FLOPs for each combination of its indices."""
    a, b, equation = node.args
    letters = dict(zip("".join(equation.split("->")[0].split(",")), (*a.meta["val"].shape, *b.meta["val"].shape), strict=True))
    return 2 * math.prod(letters.values()) / RATE * 1e6


def sent(node: fx.Node, ranks: int) -> float:
    """Microseconds of the bytes that a rank sends in a ring, from its input buffer."""
    buffer = node.args[0].meta["val"]
    size = buffer.numel() * buffer.element_size()
    kind = str(node.target).split(".")[1]
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather_into_tensor": ranks - 1}.get(kind, (ranks - 1) / ranks)
    return size * factor / BANDWIDTH * 1e6


@pytest.mark.parametrize("frugal", [False, True])
@pytest.mark.parametrize(("name", "axes"), [("mlp", {"a": 2, "b": 2}), ("llama", {"a": 4})])
def test_the_objective_is_that_of_the_program(name: str, axes: dict[str, int], frugal: bool) -> None:
    mesh, (_, graph, _) = Mesh(axes, IDEAL), prepared(name)
    plans = [random_graph_plan(annotate(graph, mesh), seed, frugal=frugal, timed=True) for seed in (0,)]
    if not frugal:
        plans.append(plan_graph(graph, mesh, Request(input_layouts="S(0)" + "R" * (mesh.ndim - 1))))
    for plan in plans:
        local = lower(graph, plan).local((0,) * mesh.ndim).graph
        products = [product(n) for n in local.nodes if str(n.target) == EINSUM]
        within = (SHIFT, ZIGZAG)  # collectives of a ring, which are part of its node's time
        moved = [sent(n, mesh.shape[0]) for n in local.nodes if is_collective(n) and n.target not in within]
        others = [n.compute for n in plan.nodes if n.op != EINSUM]
        cuts = [0.1 for r in plan.redistributions for step in r.steps if not step.is_collective]  # the least cost of a slice or mask
        assert plan.objective == pytest.approx(math.fsum([*products, *moved, *others, *cuts]), rel=1e-9)
        assert products and sum(products) == pytest.approx(sum(n.compute for n in plan.nodes if n.op == EINSUM), rel=1e-9)
        assert moved
