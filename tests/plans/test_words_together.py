"""One-word plans on several axes: each word's layouts and collectives on its own axis, and the numbers of one device."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxshard
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.plans.parallel import read_parallel
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.compare import assert_equal_to_one_device, one_device

WORDS = {"dp_replicate": "ddp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp", "ep": "ep"}
"""torchtitan's names of axes, and what each is for."""
MATRICES = 5
"""Matrices that are not experts': of attention and of the router."""
EXPERTS = 2
ops = torch.ops.fxshard


class Mixture(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        up, down = torch.randn(experts, width, 2 * width), torch.randn(experts, 2 * width, width)
        self.experts = nn.ParameterDict({"up": nn.Parameter(up), "down": nn.Parameter(down)})

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.experts["up"])
        weights, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
        rows, ids = ops.to_experts(x.unsqueeze(1), chosen, count)
        rows = ops.expert_linear(ops.expert_linear(rows, self.experts["up"], ids).relu(), self.experts["down"], ids)
        return (ops.from_experts(rows, chosen, count) * weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    """Attention, and a mixture whose tokens choose one expert each."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mixture = Mixture(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mixture(x.flatten(0, 1)).view_as(x)


@lru_cache(maxsize=1)
def small() -> tuple[Any, PlanningGraph, Any]:
    torch.manual_seed(0)
    model, x = Block(8, 2, 4).double(), torch.randn(8, 4, 8, dtype=torch.float64, requires_grad=True)
    return (model, (x,), {}), trace(model, (x,)), one_device(model, (x,), {})


@lru_cache(maxsize=2)
def large(length: int = 512) -> PlanningGraph:
    """8 sequences of tokens of width 1024, with 8 experts, in bfloat16."""
    with torch.device("meta"):
        model, x = Block(1024, 8, 8).to(torch.bfloat16), torch.empty(8, length, 1024, dtype=torch.bfloat16, requires_grad=True)
    return trace(model, (x,))


def planned(graph: PlanningGraph, axes: str, hardware: str = "cpu") -> Any:
    mesh = fxshard.Mesh(dict.fromkeys(axes.split(), 2), hardware)
    return plan_graph(graph, mesh, Request(parallel=read_parallel({axis: WORDS[axis] for axis in mesh.axis_names}, mesh)))


@pytest.mark.parametrize("axes", ["dp_shard cp", "cp tp", "dp_replicate ep", "dp_shard ep", "ep dp_shard", "cp ep", "tp ep"])
def test_the_numbers_are_those_of_one_device(axes: str) -> None:
    case, graph, reference = small()
    program = lower_plan(graph, planned(graph, axes))
    assert_equal_to_one_device(simulate_program(program, program_values(program, *case)), reference)


GRADIENTS = {"all_reduce": MATRICES + EXPERTS}
SHARDS = {"all_gather": MATRICES + EXPERTS, "reduce_scatter": MATRICES + EXPERTS}
MEGATRON = {"all_reduce": 4, "all_gather": 1}
"""Two all-reduces forward and two backward; and the router, which is small but never whole, is gathered."""
TRAVEL = {"all_reduce": MATRICES, "dispatch": 2, "combine": 2, "all_to_all": 4}
"""GShard: rows go and return, forward and backward, after their numbers; the gradients of what is not experts' are added up."""


@pytest.mark.parametrize(
    ("axes", "length", "want"),
    [
        ("dp_replicate ep", 512, {"dp_replicate": GRADIENTS, "ep": TRAVEL}),
        ("dp_shard cp", 2048, {"dp_shard": SHARDS, "cp": GRADIENTS}),
        ("cp tp", 512, {"cp": GRADIENTS, "tp": MEGATRON}),
        ("tp ep", 512, {"tp": MEGATRON, "ep": {"all_reduce": MATRICES}}),
    ],
)
def test_each_axis_has_the_collectives_of_its_word(axes: str, length: int, want: dict[str, dict[str, int]]) -> None:
    """How sequences and rows move on ``cp`` and ``ep`` is by price: there, other kinds may come in addition."""
    collectives = planned(large(length), axes, "h100").collectives
    for axis, kinds in want.items():
        found = Counter(c.kind for c in collectives if c.axis == axis)
        assert {kind: found[kind] for kind in kinds} == kinds and (axis in ("cp", "ep") or set(found) == set(kinds)), (axis, found)


def test_beside_experts_fully_shard_gathers_the_other_matrices() -> None:
    """Experts, sharded along another dim there, may be gathered or compute with their columns: the solver chooses."""
    sent = [c for c in planned(large(), "dp_shard ep", "h100").collectives if c.axis == "dp_shard"]
    assert {c.value for c in sent if c.kind == "all_gather"} >= {f"{name}_weight" for name in "qkvo"}
    assert sum(c.kind == "reduce_scatter" and c.readers[0][0] == "output" for c in sent) >= len("qkvo")


@pytest.mark.parametrize(
    ("axes", "want"),
    [
        ("dp_shard ep", {"q_weight": "S(0)R", "mixture_experts_up": "S(2)S(0)", "args_0": "S(0)S(0)"}),
        ("cp tp", {"q_weight": "RS(0)", "args_0": "S(1)R"}),
        ("cp ep", {"q_weight": "RR", "mixture_experts_up": "RS(0)", "args_0": "S(1)S(0)"}),
    ],
)
def test_each_axis_has_the_layouts_of_its_word(axes: str, want: dict[str, str]) -> None:
    plan = planned(large(), axes, "h100")
    assert {name: str(plan.specs[name].outputs[0]) for name in want} == want


class Flattened(nn.Module):
    """A projection of flattened tokens, as GPT-2's and those of most mixtures are: its view cannot be cut along the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.reshape(-1, x.shape[-1]) @ self.weight).view(x.shape)


def test_results_that_cannot_have_a_words_layout_are_left_to_the_solver(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Flattened(6), nn.Linear(6, 6)).double()
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    plan = fxshard.plan(model, (x,), fxshard.Mesh({"cp": 2}), parallel={"cp": "cp"}, cache=False)
    what = r"ContextParallel\(dim=1\)} does not hold for 1 result of modules, whose operators cannot give that layout; .*: view"
    assert re.search(what, caplog.text)
    assert {str(spec.outputs[0]) for name, spec in plan.specs.items() if name in ("add", "add_1")} == {"S(1)"}  # the results of 0 and 2
    assert_equal_to_one_device(fxshard.simulate(model, (x,), plan=plan), one_device(model, (x,), {}))
