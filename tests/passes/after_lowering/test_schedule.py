"""Gathers of parameters are issued ahead of their readers, but only as early as hides them, because each one in flight takes memory."""

from __future__ import annotations

import torch
from passes.round_hardware import RATES
from torch import fx, nn

from fxshard.mesh.mesh import Mesh
from fxshard.passes.after_lowering.optimise import OPTIMISATIONS
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram, is_collective, is_wait

LAYERS = 6


def fully_sharded(rows: int) -> ShardedProgram:
    """Each weight is gathered before its product; a product of many rows takes longer than the gather of its weight."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS))).to("meta")
    graph = trace(model, (torch.empty(rows, 64, device="meta"),), train=False)
    pins = {name: "S(0)" for name, _ in model.named_parameters()}
    request = Request(train=False, input_layouts="S(0)", output_layouts="S(0)", pins=pins, cache=False)
    return lower(graph, plan_graph(graph, Mesh({"dp": 4}, hardware=RATES), request))


def most_in_flight(program: ShardedProgram) -> int:
    """The most gathers that are issued and not yet waited for."""
    flying = most = 0
    for node in program.first.graph.nodes:
        flying += is_collective(node) - is_wait(node)
        most = max(most, flying)
    return most


def test_a_gather_that_one_product_hides_is_issued_before_that_product() -> None:
    before = fully_sharded(rows=1 << 24)
    after = OPTIMISATIONS["schedule"](before)
    assert len(after.collectives) == LAYERS
    assert most_in_flight(before) == 1
    order = ["gather" if is_collective(n) else "wait" if is_wait(n) else "product" for n in after.first.graph.nodes if _counts(n)]
    assert order == ["gather", "wait", *["gather", "product", "wait"] * (LAYERS - 1), "product"]


def test_gathers_longer_than_the_products_queue_up() -> None:
    assert most_in_flight(OPTIMISATIONS["schedule"](fully_sharded(rows=4))) > 2


def _counts(node: fx.Node) -> bool:
    return is_collective(node) or is_wait(node) or node.target is torch.ops.fxshard.einsum.default
