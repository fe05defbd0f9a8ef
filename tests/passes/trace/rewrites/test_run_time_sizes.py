"""Sizes and numbers that depend on the data: traced as symbols, replicated and listed, right on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxshard
from fxshard.errors import PlanError, TraceError
from fxshard.graph.planning_graph import UNKNOWN
from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.verify import verify_plan
from fxshard.passes.trace.trace import trace
from fxshard.plans import plan_json
from fxshard.plans.plan_data import OpSpec
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.testing.random_plan import random_graph_plan

MESH = Mesh({"x": 2})


class Calls(nn.Module):
    """A model that multiplies its input by a weight and calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.arange(-3.0, 3.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.weight)


X = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(4, 6)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x[x > 0] * 2,
    "larger mask": lambda x: torch.masked_select(x[0], x > 0),
    "unique": lambda x: torch.unique(x.round()),
    "norm of some rows": lambda x: F.layer_norm(x[x.sum(-1) > 0], (6,)),
    "group norm of some rows": lambda x: F.group_norm(x[x.sum(-1) > 0], 3),
    "sum of some": lambda x: x[x > 0].sum() + x.sum(),
    "number": lambda x: (x + 1, x.sum().item()),
    "integer": lambda x: int(x.argmax().item()),
    "bool": lambda x: bool((x > 0).any().item()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_equal_to_one_device(name: str, seed: int) -> None:
    model = Calls(FUNCTIONS[name])
    annotated = annotate(trace(model, (X,), train=False), MESH)
    plan = random_graph_plan(annotated, seed)
    got, want = fxshard.simulate(fxshard.lower(model, (X,), plan), (X,), weights=dict(model.named_parameters())).outputs, model(X)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert not isinstance(want, int | float) or type(got) is type(want)


def test_gradients_flow_through_unknown_sizes() -> None:
    model = Calls(lambda x: x[x > 0].exp().sum())
    graph = trace(model, (X,))
    plan = random_graph_plan(annotate(graph, MESH), 3)
    result = fxshard.simulate(fxshard.lower(model, (X,), plan), (X,), weights=dict(model.named_parameters()))
    model(X).backward()
    torch.testing.assert_close(result.grads["weight"], model.weight.grad, rtol=1e-12, atol=0)


def test_within_a_memory_limit() -> None:
    model = Calls(lambda x: x[x > 0].exp().sum())
    free = fxshard.plan(model, (X,), MESH, cache=False)
    limit = sum(free.memory.values())
    assert sum(fxshard.plan(model, (X,), MESH, cache=False, memory_limit=limit).memory.values()) <= limit


def test_unknown_sizes_are_listed_in_the_plan() -> None:
    model = Calls(lambda x: x.nonzero())
    annotated = annotate(trace(model, (X,), train=False), MESH)
    assert annotated.fallbacks == (("nonzero", "it returns a tensor whose size is known only at run time"),)
    plan = random_graph_plan(annotated, 0)
    assert next(n for n in plan.nodes if n.name == "nonzero").shapes == ((UNKNOWN, 2),)
    assert ShardingPlan.from_json(plan_json.dumps(plan)) == plan


def test_a_plan_that_shards_an_unknown_size_is_refused() -> None:
    annotated = annotate(trace(Calls(lambda x: x.nonzero()), (X,), train=False), MESH)
    plan = random_graph_plan(annotated, 0)
    cut = Layout.parse("S(0)")
    readers = {n.name: OpSpec((cut,), n.spec.outputs) for n in plan.nodes if n.name == "output" or n.name.startswith("sym_size")}
    specs = {"nonzero": OpSpec(plan.specs["nonzero"].inputs, (cut,)), **readers}
    nodes = tuple(dataclasses.replace(n, spec=specs.get(n.name, n.spec)) for n in plan.nodes)
    with pytest.raises(PlanError, match=r"nonzero .*cannot run as(.|\n)*leave it replicated: it returns a tensor whose size"):
        verify_plan(annotated, dataclasses.replace(plan, nodes=nodes))


def test_each_replicated_node_has_its_own_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Nodes that need a rule are listed apart from those that no rule could shard."""
    model = Calls(lambda x: torch.special.airy_ai(x).sum() + x[x > 0].exp().sum())
    plan = fxshard.plan(model, (X,), MESH, train=False)
    reasons = dict(plan.fallbacks)
    assert reasons["special_airy_ai"] == "no rule for aten.special_airy_ai.default"
    assert reasons["exp"] == "it reads a tensor whose size is known only at run time"
    assert "1 node is replicated for want of a rule: special_airy_ai;" in caplog.text
    assert "nodes are replicated, rule or not: " in caplog.text
    for said in (str(plan), fxshard.inspect.summary(plan)):
        lacking, others = said.split("replicated for want of a rule")[1].split("replicated, rule or not")
        assert "special_airy_ai" in lacking and "exp" not in lacking.replace("special_airy_ai", "")
        assert "exp" in others and "airy" not in others


def test_sparse_tensors_are_refused_where_a_gradient_would_be_lost() -> None:
    with pytest.raises(TraceError, match="sparse"):
        trace(Calls(lambda x: x.to_sparse().to_dense()), (X,))
    with pytest.raises(TraceError, match="sparse"):
        trace(Calls(lambda x: x), (X.to_sparse(),), train=False)
