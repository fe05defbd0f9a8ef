"""With weights and residual stream pinned to Megatron's layouts, the collectives are those of the paper (arXiv:1909.08053)."""

from collections import Counter
from fnmatch import fnmatch

import torch
from zoo import MLP

import fxshard
from examples.llama import Llama
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace import trace
from fxshard.planning_graph import PlanningGraph

MESH = fxshard.Mesh({"tp": 4}, hardware="h100")


def residual_pins(graph: PlanningGraph, shape: tuple[int, ...]) -> dict[str, str]:
    """The residual stream: every sum of its shape in the forward is whole."""
    forward = [n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_forward"]
    adds = [n for n in forward if str(n.target) == "aten.add.Tensor" and tuple(n.meta["val"].shape) == shape]
    return {n.name: "R" for n in adds}


def megatron(graph: PlanningGraph, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, str]:
    """Column-parallel weights cut by output, row-parallel ones by input; what is not named is whole."""
    pins = {}
    for end in graph.inputs_of("parameter"):
        ndim = graph.by_name[end.node].meta["val"].dim()
        if any(fnmatch(end.name, c) for c in columns):
            pins[end.name] = "S(0)"
        elif any(fnmatch(end.name, r) for r in rows) and ndim == 2:
            pins[end.name] = "S(1)"
        else:
            pins[end.name] = "R"
    return pins


def kinds(plan: fxshard.ShardingPlan) -> Counter[str]:
    return Counter(c.kind for c in plan.collectives)


def test_mlp_needs_2l_minus_1_all_reduces() -> None:
    pairs = 3
    with torch.device("meta"):
        model, x = MLP(pairs, dim=1024, hidden=4096), torch.empty(64, 1024)
    graph = trace(model, (x,))
    pins = megatron(graph, ("up.*",), ("down.*",)) | residual_pins(graph, (64, 1024))
    plan = plan_graph(graph, MESH, Request(pins=pins, input_layouts="R", output_layouts="R"))
    assert plan.gap == 0
    assert kinds(plan) == {"all_reduce": 2 * pairs - 1}
    assert all(c.buffer == (64, 1024) for c in plan.collectives)


def test_llama_needs_4l_all_reduces_with_a_trained_embedding() -> None:
    """L layers: two forward and two backward each; embedding, head and loss are whole here, so they add none."""
    with torch.device("meta"):
        model = Llama.small(dim=1024, ffn=4096)
        tokens = torch.empty(2, 32, dtype=torch.int64)
    layers = len(model.layers)
    graph = trace(model, (tokens, tokens))
    columns = ("layers.*.attention.w[qkv].weight", "layers.*.feed_forward.w[13].weight")
    rows = ("layers.*.attention.wo.weight", "layers.*.feed_forward.w2.weight")
    dim = model.tok_embeddings.weight.shape[1]
    pins = megatron(graph, columns, rows) | residual_pins(graph, (2, 32, dim))
    plan = plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(pins=pins, input_layouts="R", output_layouts="R"))
    assert plan.gap == 0
    whole = [c for c in plan.collectives if c.buffer == (2, 32, dim)]
    assert [c.kind for c in whole] == ["all_reduce"] * (4 * layers)
    assert len(plan.collectives) == len(whole)
