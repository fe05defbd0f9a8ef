"""With weights and residual stream pinned to Megatron's layouts, the collectives are those of the paper (arXiv:1909.08053)."""

from collections import Counter
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import MLP

import fxshard
from examples.llama import Llama
from fxshard.graph.planning_graph import PlanningGraph, operands
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace

MESH = fxshard.Mesh({"tp": 4}, hardware="h100")


def residual_pins(graph: PlanningGraph, shape: tuple[int, ...]) -> dict[str, str]:
    """Replicates the residual stream: every sum of two tensors of its shape in the forward (a sum with a bias is not one)."""
    forward = [n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_forward" and str(n.target) == "aten.add.Tensor"]
    return {n.name: "R" for n in forward if all(tuple(o.meta["val"].shape) == shape for o in operands(n))}


def megatron(graph: PlanningGraph, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, str]:
    """Shards column-parallel weights by output and row-parallel ones by input, and replicates all other parameters."""
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


class Block(nn.Module):
    """GPT-2's block with separate q, k and v, as in Megatron."""

    def __init__(self, dim: int, heads: int, affine: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=affine) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tied embedding and head; without ``embed`` it takes embedded tokens, its norms learn nothing, and it returns hidden states."""

    def __init__(self, layers: int, dim: int, embed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim) if embed else None
        self.layers = nn.ModuleList(Block(dim, 8, embed) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if self.embedding is None else F.linear(x, self.embedding.weight)


@pytest.mark.parametrize(("embed", "expected"), [(True, 4), (False, 3)])
def test_gpt_needs_4l_all_reduces_or_one_less(embed: bool, expected: int) -> None:
    """4L with a trained embedding; without one the gradient of the first block's input is not needed, so 4L - 1."""
    layers, dim = 2, 1024
    with torch.device("meta"):
        model = GPT(layers, dim, embed)
        x = torch.empty(2, 32, dtype=torch.int64) if embed else torch.empty(2, 32, dim)
    graph = trace(model, (x,))
    columns = ("layers.*.q.*", "layers.*.k.*", "layers.*.v.*", "layers.*.up.*")
    pins = megatron(graph, columns, ("layers.*.out.*", "layers.*.down.*")) | residual_pins(graph, (2, 32, dim))
    plan = plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(pins=pins, input_layouts="R", output_layouts="R"))
    assert plan.gap == 0
    assert kinds(plan) == {"all_reduce": 4 * (layers - 1) + expected}
    assert all(c.buffer == (2, 32, dim) for c in plan.collectives)


def llama_plan(vocabulary: int, *cut: str, length: int = 32) -> fxshard.ShardingPlan:
    """Two layers with Megatron's pins, and the weights in ``cut`` column-parallel, too; tokens (2, length), hidden size 1024."""
    with torch.device("meta"):
        model = Llama.small(dim=1024, ffn=4096, vocab=vocabulary)
        tokens = torch.empty(2, length, dtype=torch.int64)
    graph = trace(model, (tokens, tokens))
    columns = ("layers.*.attention.w[qkv].weight", "layers.*.feed_forward.w[13].weight", *cut)
    rows = ("layers.*.attention.wo.weight", "layers.*.feed_forward.w2.weight")
    pins = megatron(graph, columns, rows) | residual_pins(graph, (2, length, 1024))
    return plan_graph(graph, fxshard.Mesh({"tp": 2}, "h100"), Request(pins=pins, input_layouts="R", output_layouts="R"))


def test_llama_needs_4l_all_reduces_with_a_trained_embedding() -> None:
    """Each of L layers has two in the forward and two in the backward. Embedding, head and loss are replicated and add none."""
    plan = llama_plan(256)
    assert plan.gap == 0
    assert [(c.kind, c.buffer) for c in plan.collectives] == [("all_reduce", (2, 32, 1024))] * (4 * 2)


def test_a_sharded_vocabulary_adds_the_collectives_of_embedding_head_and_loss() -> None:
    """Besides 4L: the all-reduces of looked-up rows and of the head's gradient; and for the loss three of one number per token in the
    forward, for the maximum, the sum of exponentials and the score of the target. The backward has none.
    """
    length = 128
    plan = llama_plan(32000, "tok_embeddings.weight", "output.weight", length=length)
    assert plan.gap == 0
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    rows = [c.value for c in plan.collectives if c.buffer == (2, length, 1024)]
    assert len(rows) == 4 * 2 + 2 and "embedding" in rows
    others = [(c.value, c.buffer) for c in plan.collectives if c.buffer != (2, length, 1024)]
    assert sorted(others) == [(value, (2 * length,)) for value in ("amax", "sum_exp", "target_score")]


class Classifier(nn.Module):
    """One linear layer and its cross-entropy."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), target)


def test_a_sharded_batch_reduces_two_numbers_for_the_loss() -> None:
    """The sum of losses and the sum of weights to divide it by. The only other collective is that of the layer's gradient."""
    with torch.device("meta"):
        model, x, target = Classifier(32000), torch.empty(65536, 64), torch.empty(65536, dtype=torch.int64)
    graph = trace(model, (x, target))
    request = Request(pins={"head.weight": "R"}, input_layouts="S(0)", output_layouts="R", objective="communication")
    plan = plan_graph(graph, MESH, request)
    assert [(c.kind, c.buffer) for c in plan.collectives] == [("all_reduce", ()), ("all_reduce", ()), ("all_reduce", (32000, 64))]
