"""A causal attention for tests of context parallelism, and plans of it whose attention takes a given form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.graph.targets import name_of
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import Annotated, annotate
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.testing.random_plan import random_graph_plan

SEQUENCE = 2
"""The dim of queries, and of keys, in [batch, heads, sequence, head dim]."""


class CausalAttention(nn.Module):
    """Grouped-query attention with 4 heads of queries, ``kv_heads`` of keys and values; causal or not. ``size``: of a head of values."""

    def __init__(self, kv_heads: int = 2, causal: bool = True, size: int = 2) -> None:
        super().__init__()
        self.causal, self.size = causal, size
        self.wq, self.wo = nn.Linear(8, 8, bias=False), nn.Linear(4 * size, 8, bias=False)
        self.wk, self.wv = (nn.Linear(8, n * kv_heads, bias=False) for n in (2, size))

    def forward(self, x: Tensor) -> Tensor:
        sizes = ((self.wq, 2), (self.wk, 2), (self.wv, self.size))
        q, k, v = (w(x).unflatten(-1, (-1, n)).transpose(1, 2) for w, n in sizes)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def inputs(length: int, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length)),)


@lru_cache(maxsize=8)
def traced(length: int, kv_heads: int = 2, causal: bool = True, size: int = 2) -> tuple[nn.Module, PlanningGraph]:
    torch.manual_seed(0)
    model = CausalAttention(kv_heads, causal, size).double()
    return model, trace(model, inputs(length), train=True)


def with_attention(annotated: Annotated, wanted: Callable[[OpSpec, int], bool]) -> Annotated:
    """Keeps the specs of attention and its backward that are ``wanted``; its second argument is the operand number of the queries."""
    specs = dict(annotated.specs)
    for node in annotated.graph.nodes:
        name = name_of(node.target) if node.op == "call_function" else ""
        if name.startswith("fxshard.sdpa"):
            specs[node.name] = tuple(s for s in specs[node.name] if wanted(s, "backward" in name))
            assert specs[node.name], f"{name} has no such spec"
    return replace(annotated, specs=specs)


def gathered(spec: OpSpec, query: int) -> bool:
    """Whether queries are sharded along the sequence, and keys are whole there."""
    return bool(spec.inputs[query].axes_on(SEQUENCE)) and not spec.inputs[query + 1].axes_on(SEQUENCE)


def ring(spec: OpSpec, query: int) -> bool:
    """Whether queries and keys are sharded along the sequence."""
    return bool(spec.inputs[query + 1].axes_on(SEQUENCE))


def plan_of(graph: PlanningGraph, mesh: Mesh, wanted: Callable[[OpSpec, int], bool], seed: int) -> ShardingPlan:
    """A random plan in which attention has one of the ``wanted`` specs."""
    return random_graph_plan(with_attention(annotate(graph, mesh), wanted), seed)


def ulysses_plan(length: int, mesh: Mesh, kv_heads: int = 2) -> ShardingPlan:
    """The solver's plan in which everything around attention is sharded along the sequence, and attention by heads."""
    model, graph = traced(length, kv_heads)
    attention = next(n.name for n in graph.nodes if n.op == "call_function" and name_of(n.target).startswith("fxshard.sdpa"))
    along, whole = "S(1)" + "R" * (mesh.ndim - 1), "R" * mesh.ndim
    pins = dict.fromkeys(("args[0]", "wo", "wq", "wk", "wv", "wo.inputs"), along) | {f"w{one}.weight": whole for one in "qkvo"}
    return fxshard.plan(model, inputs(length), mesh, pins={**pins, attention: (along, along)}, output_layouts=whole, cache=False)
