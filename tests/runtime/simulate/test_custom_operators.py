"""Models with operators of the user, simulated: without a rule replicated and reported, with one sharded; changed and missing rules."""

from __future__ import annotations

import logging

import pytest
import torch

import fxshard
from fxshard.errors import PlanError, RunError, TraceError
from tests.custom_operators import Gated, local_ramp, ramp, register_gate
from tests.passes.tracing import Function, check_eager, real

pytestmark = pytest.mark.usefixtures("own_rules")
GATES = ("gate", "gate_backward")
MESH = fxshard.Mesh({"a": 2})


def gated() -> tuple[Gated, torch.Tensor]:
    torch.manual_seed(0)
    return Gated().double(), real(5, 3, 6)


def planned() -> fxshard.ShardingPlan:
    model, x = gated()
    return fxshard.plan(model, (x,), MESH, pins={"gate": "S(0)", "getitem": "S(0)"})


def test_without_a_rule_an_operator_is_replicated_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, x = gated()
    with caplog.at_level(logging.WARNING, "fxshard"):
        plan = fxshard.plan(model, (x,), MESH, input_layouts="S(0)")
    assert [node for node, _ in plan.fallbacks] == list(GATES)
    assert "2 nodes are replicated for want of a rule: gate, gate_backward" in caplog.text
    assert {str(layout) for n in GATES for layout in plan.specs[n].outputs} == {"R"}
    check_eager(model, x, plans=3)


def test_with_a_rule_an_operator_is_sharded() -> None:
    register_gate()
    plan = planned()
    assert plan.fallbacks == ()
    assert str(plan.specs["gate"]) == "S(0), R -> S(0)" and str(plan.specs["gate_backward"]) == "S(0), S(0), R -> S(0), P"
    check_eager(*gated(), plans=8)


def test_a_local_form() -> None:
    """Uneven columns: 5 on 2 x 2 ranks."""
    fxshard.register_rule(ramp, "b t -> b t", local=local_ramp)
    graph, _ = check_eager(Function(lambda self, x: ramp(x)), real(4, 5, grad=False), train=False, plans=6)
    assert "tests.ramp.default" in {str(n.target) for n in graph.nodes}


def test_a_plan_needs_the_rules_that_it_was_made_with() -> None:
    model, x = gated()
    whole = fxshard.plan(model, (x,), MESH, input_layouts="S(0)")
    register_gate()
    sharded = planned()
    assert whole.graph_hash == sharded.graph_hash  # rules change which layouts are legal, not the graph
    fxshard.lower(model, (x,), whole)  # replicated remains legal
    fxshard.register_rule("tests::gate", "b! s h, h -> b! s h", override=True)
    with pytest.raises(PlanError, match=r"gate \(tests\.gate\.default\) cannot run as S\(0\), R -> S\(0\)"):
        fxshard.lower(model, (x,), sharded)


def test_a_plan_with_a_rule_that_is_missing_names_the_remedy() -> None:
    from fxshard.strategies.engine import registry

    register_gate()
    sharded = planned()
    del registry._RULES["tests.gate.default"]
    fxshard.strategies.cache_clear()
    with pytest.raises(PlanError, match=r"cannot run as S\(0\), R -> S\(0\)(.|\n)*it has no rule here: register"):
        fxshard.lower(*gated()[:1], (gated()[1],), sharded)


@torch.library.custom_op("tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("tests::no_backward", mutates_args=())
def no_backward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


no_backward.register_fake(torch.empty_like)
LIBRARY = torch.library.Library("tests", "FRAGMENT")
LIBRARY.define("plain(Tensor x) -> Tensor")
LIBRARY.impl("plain", torch.clone, "CPU")


@pytest.mark.parametrize("name", ["no_fake", "plain"])
def test_an_operator_without_a_fake(name: str) -> None:
    model = Function(lambda self, x: getattr(torch.ops.tests, name)(x))
    with pytest.raises(TraceError, match=rf'tests::{name} does not give the shape(.|\n)*register_fake\("tests::{name}"\)') as error:
        fxshard.plan(model, (real(4, 6),), MESH)
    assert error.value.where is not None and __file__ in error.value.where


def test_an_operator_without_a_backward() -> None:
    model = Function(lambda self, x: no_backward(x))
    with pytest.raises(TraceError, match=r"tests.no_backward.default has no backward(.|\n)*register_autograd"):
        fxshard.plan(model, (real(4, 6),), MESH)
    check_eager(model, real(4, 6), train=False)


@torch.library.custom_op("tests::scale_in_place", mutates_args=("x",))
def scale_in_place(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("tests::drawn", mutates_args=())
def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@torch.library.custom_op("tests::drawn_and_tagged", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def drawn_and_tagged(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


for op in (drawn, drawn_and_tagged):
    op.register_fake(torch.empty_like)


def _scaled(_: object, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    scale_in_place(y, 3.0)
    return y


def test_an_operator_that_changes_its_arguments_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Torch functionalises the call, and no rule can be given to it."""
    model, x = Function(_scaled), real(4, 6, grad=False)
    with caplog.at_level(logging.WARNING, "fxshard"):
        ((_, reason),) = fxshard.plan(model, (x,), MESH, train=False).fallbacks
    assert reason.startswith("tests.scale_in_place.default changes its arguments") and "1 node is replicated, rule or not" in caplog.text
    check_eager(model, x, train=False)


def test_random_operators() -> None:
    """An operator tagged as random is refused. For an untagged one replicas differ, and the error names this as a possible cause."""
    x = real(4, 6, grad=False)
    with pytest.raises(TraceError, match=r"drawn_and_tagged\.default draws random numbers"):
        fxshard.plan(Function(lambda self, x: drawn_and_tagged(x)), (x,), MESH, train=False)
    model = Function(lambda self, x: drawn(x))
    with pytest.raises(RunError, match=r"replicas differ(.|\n)*an operator of yours that draws random numbers"):
        fxshard.simulate(model, (x,), fxshard.plan(model, (x,), MESH, train=False))
