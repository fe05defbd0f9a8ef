"""The planning graph does not depend on the device: real, meta and fake models give the same graph and the same plan."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from zoo import make

from fxshard._torch_compat import pytree
from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace

MESH = Mesh({"dp": 2, "tp": 2}, hardware="h100")
Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def encoder() -> Case:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (torch.randn(4, 5, 8),), {}


CASES: dict[str, Callable[[], Case]] = {name: lambda name=name: make(name, torch.float32) for name in ("mlp", "cnn", "llama", "gpt2")}
CASES["encoder with dropout"] = encoder


def moved(case: Case, move: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """The case with every tensor moved; unlike ``Module.to("meta")`` this keeps ties."""
    model, args, kwargs = case
    memo: dict[int, Any] = {id(p): nn.Parameter(move(p.detach()), p.requires_grad) for p in model.parameters()}
    memo |= {id(b): move(b) for b in model.buffers()}
    return copy.deepcopy(model, memo), *pytree.tree_map_only(torch.Tensor, move, (args, kwargs))


@pytest.mark.parametrize("make_case", CASES.values(), ids=CASES)
def test_the_same_graph_and_plan_from_real_meta_and_fake_models(make_case: Callable[[], Case]) -> None:
    case = make_case()
    elsewhere = (moved(case, lambda t: t.to("meta")), moved(case, FakeTensorMode().from_tensor))
    graphs = [trace(*some) for some in (case, *elsewhere)]
    assert len({g.hash for g in graphs}) == 1
    if len(list(graphs[0].nodes)) < 400:
        real, meta = (plan_graph(g, MESH, Request()) for g in graphs[:2])
        assert real.to_json() == meta.to_json()


@pytest.mark.parametrize("train", [True, False])
def test_tracing_again_gives_the_same_graph(train: bool) -> None:
    model, args, kwargs = encoder()
    torch.manual_seed(1)
    first = trace(model, args, kwargs, train=train)
    trace(*make("mlp"))
    torch.manual_seed(2)
    assert trace(model, args, kwargs, train=train).hash == first.hash


def test_other_shapes_modes_and_dtypes_are_other_graphs() -> None:
    model, args, kwargs = encoder()
    variants = [
        trace(model, args, kwargs),
        trace(model, args, kwargs, train=False),
        trace(model, (args[0][:3],), kwargs),
        trace(copy.deepcopy(model).eval(), args, kwargs),
        trace(copy.deepcopy(model).double(), (args[0].double(),), kwargs),
    ]
    assert len({g.hash for g in variants}) == len(variants)
