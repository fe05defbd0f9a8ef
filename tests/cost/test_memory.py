"""Memory over time of graphs written by hand, with bytes counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fxshard.cost.liveness import BoundaryValue
from fxshard.cost.memory import Stage, profile_stages
from fxshard.cost.optimizer.optimizer_state import Optimizer
from fxshard.errors import OptionError
from fxshard.memory_profile import HeldTensor, MemoryProfile, StepRun

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
K = 1000 * 4
"""Bytes of a thousand float32."""


class Builder:
    """Builds a graph whose values are meta tensors; views share their storage."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, name: str, value: torch.Tensor | None = None) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(1000, device="meta") if value is None else value
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def stage(self, inputs: dict[fx.Node, BoundaryValue], *results: fx.Node) -> Stage:
        self.graph.output(results)
        return Stage(self.graph, inputs, {n: BoundaryValue("output", n.name) for n in results})


def test_a_value_dies_after_its_last_reader_and_results_do_not() -> None:
    b = Builder()
    x = b.given("x")
    one = b(aten.exp.default, x)
    two = b(aten.exp.default, one)
    three = b(aten.exp.default, two)
    profile = profile_stages([b.stage({x: BoundaryValue("input", "args[0]", "S(0)")}, one, three)])
    assert profile.over_time == (2 * K, 3 * K, 4 * K)
    assert [(t.name, t.kind, t.birth, t.death, t.layout) for t in profile.tensors] == [
        ("args[0]", "input", 0, 2, "S(0)"),
        ("exp_default", "output", 0, 2, ""),
        ("exp_default_1", "temporary", 1, 2, ""),
        ("exp_default_2", "output", 2, 2, ""),
    ]
    assert profile.peak == 4 * K and profile.steps[profile.peak_step].name == "exp_default_2"
    assert profile.by_kind() == {"input": K, "output": 2 * K, "temporary": K}


def test_views_and_writes_in_place_hold_their_storage() -> None:
    b = Builder()
    x = b.given("x")
    made = b(aten.exp.default, x)
    part = b(aten.slice.Tensor, made, 0, 0, 1)
    b(aten.add_.Tensor, made, 1)
    b(aten.exp.default, x)
    last = b(aten.exp.default, part)
    profile = profile_stages([b.stage({x: BoundaryValue("input", "x")}, last)])
    assert profile.over_time == (2 * K, 2 * K, 2 * K, 3 * K, 2 * K + 4), "the fourth value has no reader"


def test_the_result_of_a_collective_lives_as_long_as_that_of_its_wait() -> None:
    b = Builder()
    x = b.given("x")
    started = b(c10d.all_gather_into_tensor.default, x, 2, "tp")
    waited = b(c10d.wait_tensor.default, started)
    b(aten.exp.default, x)
    last = b(aten.sum.default, waited)
    profile = profile_stages([b.stage({x: BoundaryValue("parameter", "w")}, last)])
    assert profile.over_time == (3 * K, 3 * K, 4 * K, 3 * K + 4)
    assert profile.by_kind(1) == {"parameter": K, "gathered": 2 * K}


def test_all_outputs_of_a_call_live_until_they_are_unpacked() -> None:
    b = Builder()
    x = b.given("x")
    both = b(aten.max.dim, b(aten.view.default, x, [10, 100]), 1)
    first = b(__import__("operator").getitem, both, 0)
    last = b(aten.exp.default, first)
    profile = profile_stages([b.stage({x: BoundaryValue("input", "x")}, last)])
    assert profile.over_time == (K, K + 10 * 4 + 10 * 8, K + 10 * 4 + 10 * 8, K + 10 * 4 + 10 * 4)


def test_the_backward_frees_saved_values_and_recomputes_others() -> None:
    f, late = Builder(), Builder()
    x = f.given("x")
    cheap = f(aten.exp.default, x)
    kept = f(aten.exp.default, cheap)
    loss = f(aten.sum.default, kept)
    forward = Stage(f.graph, {x: BoundaryValue("parameter", "w")}, {loss: BoundaryValue("output", "outputs[0]")})
    f.graph.output((loss, kept))
    same_x, same_kept, tangent = (late.given(n, v) for n, v in (("x", x.meta["val"]), ("k", kept.meta["val"]), ("t", loss.meta["val"] * 1)))
    again = late.graph.node_copy(cheap, {x: same_x}.__getitem__)  # shares meta with ``cheap``, but is computed again
    grad = late(aten.mul.Tensor, late(aten.mul.Tensor, again, same_kept), tangent)
    late.graph.output((grad,))
    backward = Stage(late.graph, {tangent: BoundaryValue("input", "tangents[0]")}, {grad: BoundaryValue("gradient", "w")})
    profile = profile_stages([forward, backward], {"optimizer": 2 * K})
    assert profile.over_time == tuple(2 * K + n for n in (2 * K, 3 * K, 2 * K + 4, 3 * K + 8, 4 * K + 8, 3 * K + 8))
    assert profile.by_kind() == {"parameter": K, "optimizer": 2 * K, "input": 4, "output": 4, "activation": K, "temporary": 2 * K}
    assert profile.by_kind(5) == {"parameter": K, "optimizer": 2 * K, "input": 4, "gradient": K, "output": 4, "temporary": K}


def test_workspace_counts_while_its_step_runs() -> None:
    tensors = (HeldTensor("a", "input", 5, (5,), "torch.int8", 0, 1), HeldTensor("b", "temporary", 7, (7,), "torch.int8", 1, 1))
    profile = MemoryProfile(tensors, (StepRun("one", "op", workspace=9), StepRun("two", "op")))
    assert profile.over_time == (14, 12) and profile.by_kind() == {"input": 5, "temporary": 9}
    assert [t.name for t in profile.alive(1)] == ["b", "a"]


@pytest.mark.parametrize(
    ("optimizer", "dtype", "size"),
    [
        (Optimizer(), torch.float32, 0),
        (Optimizer("sgd"), torch.float32, 0),
        (Optimizer("sgd_momentum"), torch.bfloat16, 2),
        (Optimizer("adam"), torch.bfloat16, 4),
        (Optimizer("adam", torch.float32), torch.bfloat16, 8),
        (Optimizer("adam", torch.float32, master_weights=True), torch.bfloat16, 12),
        (Optimizer("adam", master_weights=True), torch.float32, 8),
    ],
)
def test_bytes_of_optimizer_state(optimizer: Optimizer, dtype: torch.dtype, size: int) -> None:
    """With master weights Adam takes 12 bytes for a bfloat16 parameter (ZeRO, Rajbhandari et al., 2020, section 3.1)."""
    assert optimizer.bytes_per_element(dtype) == size


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown optimizer 'adamm'; did you mean 'adam'"):
        Optimizer("adamm")
