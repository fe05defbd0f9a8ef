"""Common subexpressions: equal calls are merged, except random ones, collectives, returned values and graphs with writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxshard.graph.planning_graph import ancestors
from fxshard.mesh.mesh import Mesh
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.runner import run_passes
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import is_collective
from fxshard.runtime.compile.compile import COMPILING, CompileState
from fxshard.runtime.rank_graph.common_subexpressions import merge_equal_calls
from fxshard.runtime.rank_graph.memory import program_memory, unbound
from fxshard.runtime.rank_graph.rank_graph import profile, rank_graph

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def merged(function: Callable[..., object], *inputs: Tensor) -> tuple[int, list[str], torch.fx.GraphModule]:
    """(how many were dropped, the operators that are left, the graph)."""
    traced = make_fx(function, tracing_mode="fake")(*inputs)
    dropped = merge_equal_calls(traced)
    return dropped, [str(n.target) for n in traced.graph.nodes if n.op == "call_function"], traced


def test_a_softmax_with_repeated_parts() -> None:
    x = torch.randn(4, 6)

    def parts(x: Tensor) -> tuple[Tensor]:
        most = x.amax(1)
        total = (x - most.unsqueeze(1)).exp().sum(1)
        return ((x - most.unsqueeze(1)).exp() / total.unsqueeze(1),)

    dropped, left, module = merged(parts, x)
    assert dropped == 3 and left.count("aten.exp.default") == 1
    assert torch.equal(module(x)[0], parts(x)[0])


def test_equal_numbers_of_different_type_or_sign_are_not_merged() -> None:
    x = torch.randn(4)
    dropped, _, module = merged(lambda x: ((x * 0.0).atan2(x) + (x * -0.0).atan2(x) + (x + 1) * (x + 1.0),), x)
    assert dropped == 0 and len(module.graph.nodes) > 8


def test_random_numbers_and_returned_tensors_stay_apart() -> None:
    def drawn(x: Tensor) -> tuple[Tensor, ...]:
        return (aten.rand_like.default(x) - aten.rand_like.default(x)).exp(), x.neg().view(-1), x.neg().view(-1)

    dropped, left, module = merged(drawn, torch.randn(2, 3))
    assert dropped == 0 and left.count("aten.rand_like.default") == 2
    _, first, second = module(torch.ones(2, 3))
    assert first.data_ptr() != second.data_ptr(), "a user may write into one of them"


def test_values_saved_for_the_backward_are_merged() -> None:
    """Of three equal values the first is returned to the user; the two saved ones, one of them a view, are merged."""

    def kept(x: Tensor) -> tuple[Tensor, ...]:
        return x.neg(), x.neg().view(-1), x.neg()

    traced = make_fx(kept, tracing_mode="fake")(torch.randn(2, 3))
    assert merge_equal_calls(traced, 1) == 1
    first, second, third = traced(torch.ones(2, 3))
    assert first.data_ptr() != second.data_ptr() == third.data_ptr()
    assert torch.equal(second.view(2, 3), first) and torch.equal(third, first)


class Heads(nn.Module):
    """Products of transposed heads, which are not contiguous: each operand must be copied."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.sin(x.view(2, 8, 4, 16).transpose(1, 2)) for x in (q, k))
        out: Tensor = (q @ k.transpose(-2, -1)).softmax(-1)
        return out


class Masked(nn.Module):
    """Computes the same mask four times; each gradient reads it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ x).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), 0.5)
        return x


def test_equal_values_are_saved_once_and_counted_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    graph = trace(Masked(), (x,))
    bound = unbound(lower_plan(graph, plan_graph(graph, Mesh({"a": 1}), Request(cache=False))))
    before, after = (run_passes(COMPILING[:count], CompileState(bound, "inductor"), None) for count in (2, 3))
    assert before.parts is not None and after.parts is not None and before.module is not None
    assert before.parts.kept - after.parts.kept == 3
    given = after.parts.backward.graph.find_nodes(op="placeholder")
    assert len(given) == len(after.parts.kept_inputs) + after.parts.kept + 1
    assert len(after.parts.forward.graph.output_node().args[0]) == 1 + after.parts.kept
    peaks = [profile(bound, before.module, parts).peak for parts in (before.parts, after.parts)]
    assert peaks[1] < peaks[0]


def test_a_product_and_its_gradient_read_one_copy() -> None:
    """Each operand is copied once: its transpose is what the gradient of the other operand reads."""
    x = torch.randn(2, 8, 64, requires_grad=True)
    graph = trace(Heads(), (x, x.detach().clone().requires_grad_()))
    bound = unbound(lower_plan(graph, plan_graph(graph, Mesh({"a": 1}), Request(cache=False))))
    module = rank_graph(bound, "inductor")
    merge_equal_calls(module)
    tangents = {n for n, end in zip(module.graph.find_nodes(op="placeholder"), bound.program.inputs, strict=False) if end.kind == "tangent"}
    copies = [n for n in module.graph.find_nodes(op="call_function", target=aten.clone.default) if not ancestors([n]) & tangents]
    assert len(tangents) == 1 and len(copies) == 2, copies


def test_collectives_stay() -> None:
    def summed(x: Tensor) -> tuple[Tensor]:
        both = [c10d.wait_tensor(c10d.all_reduce(x.neg(), "sum", "group")) for _ in range(2)]
        return (both[0] * both[1],)

    dropped, _, module = merged(summed, torch.randn(3))
    assert dropped == 1
    assert sum(map(is_collective, module.graph.nodes)) == 2


def test_a_graph_with_a_write_in_place_is_not_merged() -> None:
    def written(x: Tensor) -> tuple[Tensor]:
        one, two = x.exp(), x.exp()
        aten.add_.Tensor(one, 1)
        return (one * two,)

    dropped, _, module = merged(written, torch.zeros(3))
    assert dropped == 0
    assert torch.equal(module(torch.zeros(3))[0], torch.full((3,), 2.0))


class Twice(nn.Module):
    """The same large product at the beginning and at the end, and much memory in between."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.w = nn.Parameter(torch.randn(128, 8)), nn.Parameter(torch.randn(256, 256))
        self.u, self.v = nn.Parameter(torch.randn(8, 256)), nn.Parameter(torch.randn(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.t @ self.t.t()) @ x
        x = ((x @ self.u) @ self.w) @ self.v
        out: Tensor = (self.t @ self.t.t()) @ x
        return out


def test_under_a_memory_limit_merging_extends_no_lifetime() -> None:
    graph = trace(Twice(), (torch.randn(128, 8),), train=False)
    free = plan_graph(graph, Mesh({"a": 1}), Request(train=False, cache=False))
    peak = program_memory(lower_plan(graph, free)).peak
    dumps = {}
    for limit in (None, peak):
        plan = plan_graph(graph, Mesh({"a": 1}), Request(train=False, cache=False, memory_limit=limit))
        bound = unbound(lower_plan(graph, plan))
        module = rank_graph(bound, "inductor")
        before = profile(bound, module, None).peak
        artefact = run_passes(COMPILING[:3], CompileState(bound, "inductor"), None)
        dumps[limit] = before, profile(bound, artefact.module, artefact.parts).peak
    assert dumps[None][0] < dumps[None][1], "without a limit merging must raise the peak here"
    assert dumps[peak][0] == dumps[peak][1] <= peak
