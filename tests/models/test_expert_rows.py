"""Mixtures of experts on simulated ranks equal one device, forward and backward, whether rows are gathered, stay, or travel."""

from __future__ import annotations

import pytest
from equality import mesh_of
from expert_rows import ROWS, check, least_sent, prepared

from fxshard.passes.annotation.annotate import annotate
from fxshard.plans.plan_data import EXPERT_IMBALANCE
from fxshard.testing.random_plan import random_graph_plan
from tests.slices import diagonal


@pytest.mark.parametrize(("mesh", "sizes"), diagonal(["ep=2", "ep=4", "ep=3"], [(4, 8), (5, 7), (3, 2)]))
def test_rows_travel(mesh: str, sizes: tuple[int, int]) -> None:
    """Uneven experts and tokens, ranks without experts, and ranks without tokens included."""
    experts, tokens = sizes
    annotated = annotate(prepared(experts, tokens)[1], mesh_of(mesh))
    plans = (random_graph_plan(annotated, seed) for seed in range(20))
    check(next(p for p in plans if any(c.kind == "dispatch" for c in p.collectives)), experts, tokens)


@pytest.mark.parametrize(("mesh", "seed"), diagonal(["ep=2", "ep=4", "dp=2,ep=2"], range(6)))
def test_random_plans_equal_one_device(mesh: str, seed: int) -> None:
    check(random_graph_plan(annotate(prepared(5, 7)[1], mesh_of(mesh)), seed), 5, 7)


@pytest.mark.parametrize(("mesh", "travel"), [("dp=2,ep=1", False), ("dp=1,ep=2", True), ("ep=2,tp=1", True)])
def test_an_axis_of_one_rank_beside(mesh: str, travel: bool) -> None:
    """Rows travel between ranks of ``ep`` if it has several, as if the other axis were not there."""
    annotated = annotate(prepared(5, 7)[1], mesh_of(mesh))
    plans = (random_graph_plan(annotated, seed) for seed in range(20))
    check(next(p for p in plans if travel == any((c.kind, c.axis) == ("dispatch", "ep") for c in p.collectives)), 5, 7)


@pytest.mark.parametrize("seed", range(4))
def test_saved_and_recomputed_rows(seed: int) -> None:
    check(random_graph_plan(annotate(prepared(4, 8)[1], mesh_of("dp=2,ep=2")), seed, frugal=True), 4, 8)


def test_rows_travel_where_a_token_chooses_few_experts() -> None:
    """On 4 ranks, 1.25 x 2 / 4 of the tokens are less than the whole that a gather moves, in all four journeys of a step."""
    plan, sent = least_sent("ep=4", choices=2)
    kinds = [c.kind for c in plan.collectives]
    assert kinds.count("dispatch") == kinds.count("combine") == 2
    assert sent == {(kind, int(EXPERT_IMBALANCE * 2 * ROWS / 4 * 3 / 4)) for kind in ("dispatch", "combine")}


def test_tokens_are_gathered_where_they_choose_many() -> None:
    """On 2 ranks, four journeys of 1.25 x 4 / 2 of the tokens send more than the tokens, their gradients and the experts' matrices."""
    plan, sent = least_sent("ep=2", choices=4)
    assert not {"dispatch", "combine"} & {c.kind for c in plan.collectives}
    assert ("all_gather", ROWS // 2) in sent


@pytest.mark.parametrize("mesh, experts", [("dp=2,ep=2", "RS(0)"), ("ep=2,dp=2", "S(0)R")])
def test_experts_on_an_axis_of_their_own(mesh: str, experts: str) -> None:
    """Tokens are sharded over both axes, experts over one; the gradients of their matrices are added up over the other."""
    plan, _ = least_sent(mesh, 1, "S(0)S(0)", experts)
    assert {c.axis for c in plan.collectives if c.kind in ("dispatch", "combine")} == {"ep"}
