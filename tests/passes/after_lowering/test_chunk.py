"""Collectives cut into pieces: no cut changes results or bytes, on any plan; the timeline decides which cuts are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from equality import SLOW, check, prepared
from passes.program_differences import differences, traffic
from passes.round_hardware import RATES
from torch import nn

import fxshard
from fxshard.mesh.hardware import Hardware, Link
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.after_lowering.chunk import Choice, cut_program
from fxshard.passes.after_lowering.cut_candidates import PRODUCT
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.program.verify_program import verify_program
from fxshard.testing.random_plan import random_graph_plan


class Network(nn.Module):
    """Products with and without bias, of two and three dims, on rows that are split and merged by views, and a sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(i, o, bias=k) for i, o, k in ((6, 8, True), (8, 7, False), (6, 7, False), (7, 5, True)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, rows, 6] -> [batch * rows, 5]."""
        return self.d((self.b(self.a(x).tanh()) + self.c(x)).flatten(0, 1))


def cut_everywhere(program: ShardedProgram, dim: int, count: int) -> tuple[ShardedProgram, int]:
    """The program with every collective cut along ``dim`` of its buffer, and the number of those that could be cut."""
    found = {k: Choice(min(dim, len(c.shape) - 1), count) for k, c in enumerate(program.collectives)}
    made = cut_program(program, found)
    return made, (len(made.collectives) - len(program.collectives)) // (count - 1)


@pytest.mark.parametrize(("mesh", "shape"), [("dp=2", (4, 6)), ("dp=3", (3, 5)), ("dp=2,tp=2", (4, 6)), ("dp=2,tp=2", (5, 7))])
def test_results_and_bytes_do_not_change(mesh: str, shape: tuple[int, int]) -> None:
    model, args = Network().double(), (torch.randn(*shape, 6, dtype=torch.float64),)
    graph, cut, piecewise = trace(model, args), 0, 0
    for seed, (dim, count) in enumerate(((0, 2), (1, 2), (2, 3))):
        before = lower(graph, random_graph_plan(annotate(graph, parse_mesh(mesh)), seed, frugal=True))
        program, number = cut_everywhere(before, dim, count)
        verify_program(program)
        assert differences(program, model, args, {}) < 1e-12
        assert traffic(program) == traffic(before)
        assert {p for c in program.collectives for p in c.serves} == {p for c in before.collectives for p in c.serves}
        cut, piecewise = cut + number, piecewise + products(program) - products(before)
    assert cut > 40 and piecewise > 40, "too few collectives or products were cut"


class TwoReaders(nn.Module):
    """A product reads a gathered value; behind it another operator reads both the value and the product's result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.a, self.b = how, nn.Linear(6, 6, bias=False), nn.Linear(12 if how == "cat" else 6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.a(x)
        if self.how == "product":
            return made @ x.t()
        return self.b(torch.cat([x, made.tanh()], -1) if self.how == "cat" else x / (made.exp() + 1))


@pytest.mark.parametrize("how", ["cat", "div", "product"])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_operator_waits_for_the_pieces_of_both_operands(how: str, dim: int) -> None:
    model, args = TwoReaders(how).double(), (torch.randn(8, 6, dtype=torch.float64),)
    graph = trace(model, args)
    calls = {n.name for n in graph.nodes if n.name in annotate(graph, Mesh({"a": 2})).calls and n.name != "t"}
    pins = {e.node: "R" for e in graph.inputs_of("parameter")} | {n: "R" for n in calls if n.startswith(("einsum", "cat", "div", "tanh"))}
    plan = plan_graph(graph, Mesh({"a": 2}), Request(pins=pins, input_layouts="S(0)", output_layouts="R"))
    assert "all_gather" in {c.kind for c in plan.collectives}
    program, cut = cut_everywhere(lower(graph, plan), dim, 2)
    assert cut and differences(program, model, args, {}) < 1e-12


def products(program: ShardedProgram) -> int:
    return sum(n.target is PRODUCT for module in program.modules.values() for n in module.graph.nodes)


def megatron(rows: str, hardware: str | Hardware = RATES, mesh: int = 4, size: int = 1) -> ShardedProgram:
    """A large MLP, column-parallel then row-parallel, all dims divided by ``size``; ``rows``: layout of the activations between blocks."""
    tokens, width, hidden = 16384 // size, 8192 // size, 28672 // size
    up, down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
    model = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down, nn.LayerNorm(width)).to("meta", torch.bfloat16)
    args = (torch.empty(tokens, width, device="meta", dtype=torch.bfloat16, requires_grad=True),)
    graph = trace(model, args)
    pins = {"1.weight": "S(0)", "3.weight": "S(1)", "0.*": "R", "4.*": "R"}
    if rows != "R":  # sequence parallelism: gathered before the first product, reduced and scattered after the second, and so backward
        pins |= {"0": rows, "einsum": "S(1)", "einsum_1": "P", "einsum_2": "S(1)", "einsum_4": "P"}
    request = Request(input_layouts=rows, output_layouts=rows, pins=pins)
    return lower_plan(graph, plan_graph(graph, Mesh({"tp": mesh}, hardware=hardware), request))


@pytest.mark.parametrize(("rows", "ranks", "kinds"), [("R", 4, {"all_reduce"}), ("S(0)", 8, {"all_gather", "reduce_scatter"})])
def test_cuts_shorten_the_timeline(rows: str, ranks: int, kinds: set[str]) -> None:
    """They save at least 5 % of the time, and half of the time that the device waits."""
    program = megatron(rows, mesh=ranks)
    (effect,) = (e for e in program.effects if e.name == "chunk")
    assert effect.left_out is None
    assert effect.after.total < 0.95 * effect.before.total
    assert effect.after.waited < 0.5 * effect.before.waited
    serving = Counter(pair for c in program.collectives for pair in c.serves)
    assert kinds <= {c.kind for c in program.collectives if any(serving[pair] > 1 for pair in c.serves)}
    assert "chunk" in fxshard.inspect.passes_table(program)


@pytest.mark.parametrize("hardware", ["cpu", Hardware("late", {2: 1e15, 4: 1e15}, 1e12, 3.0, 8, Link(1e12, 500.0), None, overlap=1.0)])
def test_cuts_that_save_nothing_are_not_made(hardware: str | Hardware) -> None:
    """On a CPU nothing overlaps with a product. If latency exceeds the transfer, the pieces take longer than the whole."""
    (effect,) = (e for e in megatron("S(0)", hardware, size=8).effects if e.name == "chunk")
    assert effect.collectives[0] == effect.collectives[1] and effect.after == effect.before


@pytest.mark.parametrize("mesh", [pytest.param("a=3", marks=pytest.mark.slow), "a=2,b=2"])
def test_a_llama(mesh: str) -> None:
    """Without latency and with full overlap many collectives are worth cutting. Results equal those of one device."""
    _, graph, _ = prepared("llama")
    plan = plan_graph(graph, parse_mesh(mesh, replace(SLOW, overlap=1.0)), Request())
    (effect,) = (e for e in lower_plan(graph, plan).effects if e.name == "chunk")
    assert effect.left_out is None and effect.collectives[1] > 1.5 * effect.collectives[0]
    check("llama", plan)
