"""The passes after lowering change neither results nor bytes, on any plan, alone and together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from passes.program_differences import differences, traffic
from passes.round_hardware import RATES
from torch import nn

import fxshard
from fxshard.errors import OptionError
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.after_lowering.forward_backward import forward_collectives
from fxshard.passes.after_lowering.optimise import OPTIMISATIONS, check_without
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram, is_collective, is_wait
from fxshard.program.verify_program import verify_program
from fxshard.testing.random_plan import random_graph_plan

MESHES = ("dp=3", "dp=2,tp=2")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 5)).double()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("names", [("schedule",), ("chunk",), ("bucket",), tuple(OPTIMISATIONS)])
def test_results_and_bytes_do_not_change(names: tuple[str, ...], mesh: str) -> None:
    model, args = network(), (torch.randn(5, 6, dtype=torch.float64),)
    graph = trace(model, args)
    for seed in range(2):
        plan = random_graph_plan(annotate(graph, parse_mesh(mesh)), seed, frugal=seed == 1)
        program = before = lower(graph, plan)
        for name in names:
            program = OPTIMISATIONS[name](program)
            verify_program(program)
        assert differences(program, model, args, {}) < 1e-12
        assert traffic(program) == traffic(before)
        assert Counter(p for c in program.collectives for p in c.serves) == Counter(p for c in before.collectives for p in c.serves)


def data_parallel(hardware: str = "h100") -> ShardedProgram:
    """Replicated parameters and a sharded batch: one all-reduce in the backward for each weight and each bias."""
    model, args = network().to("meta"), (torch.empty(1 << 18, 6, dtype=torch.float64, device="meta"),)
    graph = trace(model, args)
    pins = {n: "R" for n, _ in model.named_parameters()}
    return lower(
        graph, plan_graph(graph, Mesh({"dp": 4}, hardware=hardware), Request(input_layouts="S(0)", output_layouts="S(0)", pins=pins))
    )


def test_gradients_of_biases_share_one_all_reduce() -> None:
    program = data_parallel("cpu")
    assert Counter(c.kind for c in program.collectives) == {"all_reduce": 8}
    joined = OPTIMISATIONS["bucket"](OPTIMISATIONS["schedule"](program))
    assert len(joined.collectives) == 1
    assert joined.collectives[0].bytes == sum(c.bytes for c in program.collectives)
    assert len(joined.collectives[0].serves) == 8


def test_large_gradients_are_not_joined() -> None:
    """Packing two gradients of 64 MB takes longer than starting one more all-reduce."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False), nn.LayerNorm(4096))
    graph = trace(model.to("meta"), (torch.empty(1 << 16, 4096, device="meta"),))
    pins = {n: "R" for n, _ in model.named_parameters()}
    request = Request(input_layouts="S(0)", output_layouts="S(0)", pins=pins)
    program = lower(graph, plan_graph(graph, Mesh({"dp": 4}, hardware="h100"), request))
    program = OPTIMISATIONS["bucket"](OPTIMISATIONS["schedule"](program))
    assert sorted(len(c.serves) for c in program.collectives) == [1, 1, 2]


def distances(program: ShardedProgram) -> list[tuple[int, int]]:
    """For each collective, the number of compute operators before it and before its wait."""
    graph, count, begun, found = program.local((0,) * program.mesh.ndim).graph, 0, {}, []
    for node in graph.nodes:
        if is_collective(node):
            begun[node] = count
        elif is_wait(node):
            found.append((begun[node.all_input_nodes[0]], count))
        elif "einsum" in str(node.target) or "tanh" in str(node.target):
            count += 1
    return sorted(found)


def test_collectives_start_early_and_are_waited_for_late() -> None:
    before = data_parallel()
    after = OPTIMISATIONS["schedule"](before)
    last = max(w for _, w in distances(after))
    assert all(wait == last for _, wait in distances(after)), "a gradient is waited for before the last operator"
    assert any(wait < last for _, wait in distances(before))
    assert all(a <= b for (a, _), (b, _) in zip(distances(after), distances(before), strict=True))
    assert forward_collectives(after) == (False,) * 8


def test_a_pass_can_be_left_out() -> None:
    model, args = network().to("meta"), (torch.empty(1 << 18, 6, dtype=torch.float64, device="meta"),)
    plan = fxshard.plan(model, args, Mesh({"dp": 2}, hardware=RATES), input_layouts="S(0)", pins={"*.weight": "R", "*.bias": "R"})
    both, none = fxshard.lower(model, args, plan), fxshard.lower(model, args, plan, without=list(OPTIMISATIONS))
    assert [e.name for e in both.effects] == list(OPTIMISATIONS) and not none.effects
    assert len(both.collectives) < len(none.collectives) == len(plan.collectives)
    text = fxshard.inspect.passes_table(both)
    assert all(name in text for name in OPTIMISATIONS)
    with pytest.raises(OptionError, match=r"no pass 'buckets'.*bucket"):
        fxshard.lower(model, args, plan, without=["buckets"])


@pytest.mark.parametrize("names", ["bucket", 3, [3], {"bucket"}, None])
def test_passes_to_leave_out_are_a_list_of_names(names: Any) -> None:
    with pytest.raises(OptionError, match=r"^without is "):
        check_without(names)
