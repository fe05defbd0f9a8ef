"""A node has specs for the reductions that can be pending at it, and for no others."""

from __future__ import annotations

import torch

from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.annotate import annotate, pending_reductions
from fxshard.passes.trace.trace import trace
from tests.passes.tracing import Function, real


def test_a_maximum_is_pending_only_where_it_can_arrive() -> None:
    """It passes through views, maxima and monotonic operators; that of a softmax stays inside. A sum can be pending anywhere."""

    def function(_: object, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        most = torch.maximum(x.amax(0).view(2, 3), y)
        return (most + 1) * y.softmax(1)

    graph = trace(Function(function), (real(4, 6, grad=False), real(2, 3, grad=False)), train=False)
    annotated = annotate(graph, Mesh({"a": 2}))
    found = {str(graph.by_name[name].target): ops for name, ops in pending_reductions(graph, annotated.calls).items()}
    both = {op for op, ops in found.items() if ops == {"sum", "max"}}
    monotonic = {"aten.view.default", "aten.maximum.default", "aten.add.Tensor"}
    assert both == monotonic | {"aten.mul.Tensor", "fxshard.sum_exp.default", "fxshard.softmax.default"}
    assert all("sum" in ops for ops in found.values())
    pending = {node for node, specs in annotated.specs.items() if any("P(max)" in str(layout) for s in specs for layout in s.inputs)}
    assert {str(graph.by_name[node].target) for node in pending} == monotonic
