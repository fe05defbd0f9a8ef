"""why_collective: collectives that the backward repeats, and questions in the user's names."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import fxshard
from fxshard.layout.redistribution import single_step
from fxshard.plans.plan_data import OpSpec, PlanEnd, PlannedNode, Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from tests.plans.small_plans import L, small_plan

STEP = single_step(1, L("S(0)")[0], L("R")[0])
MESH = fxshard.Mesh({"tp": 2})


def gathered(value: str, *readers: tuple[str, int]) -> Redistribution:
    assert STEP is not None
    return Redistribution(value, (8, 4), 4, L("RS(0)"), L("RR"), (STEP,), readers, 1.0)


def with_moves(*moves: Redistribution) -> ShardingPlan:
    """The small plan with two more nodes, ``mm_again`` and ``late``, and with ``moves`` as its redistributions."""
    plan = small_plan()
    again = PlannedNode("mm_again", "aten.mm.default", plan.nodes[2].spec, ((6, 4),), ("float32",), 1.0)
    whole = PlannedNode("late", "aten.mul.Tensor", OpSpec((L("RR"),), (L("RR"),)), ((6, 4),), ("float32",), 1.0)
    lines = {**plan.lines, "late": "model.py:9: late"}
    return dataclasses.replace(plan, nodes=(*plan.nodes, again, whole), redistributions=moves, lines=lines)


def test_a_repeated_gather_names_the_first() -> None:
    plan = with_moves(gathered("x", ("mm", 0)), gathered("w", ("mm", 1)), gathered("w", ("late", 0)))
    first, second = plan.why_collective(1), plan.why_collective(2)
    assert first.repeats == "" and plan.why_collective(0).repeats == ""
    assert second.repeats == "the backward repeats what the forward did instead of keeping the result; collective 1 is the first time"
    assert str(second).splitlines()[2] == second.repeats


def test_a_recomputed_block_names_the_first_collective_if_there_is_one() -> None:
    plan = with_moves(gathered("mm", ("output", 0)), gathered("mm_again", ("late", 0)))
    second = plan.why_collective(1)
    assert second.repeats == "the backward computes this block again instead of keeping its values; collective 0 is the first time"
    assert second.producer.line == plan.lines["mm"] and "plan.explain('mm', 'RR')" in str(second)
    (alone,) = [with_moves(gathered("mm_again", ("late", 0))).why_collective(0)]
    assert alone.repeats == "the backward computes this block again instead of keeping its values"


def test_a_plan_lists_gathers_done_twice_apart_from_other_moves() -> None:
    slices = single_step(1, L("R")[0], L("S(0)")[0])
    assert slices is not None
    cut = Redistribution("x", (6, 8), 4, L("S(0)R"), L("S(0)S(0)"), (slices,), (("late", 0),), 0.5)
    plan = with_moves(
        gathered("w", ("mm", 1)), cut, gathered("w", ("late", 0)), cut, gathered("mm", ("late", 0)), gathered("mm_again", ("late", 0))
    )
    text = str(plan)
    assert "gathered twice  lin.weight, again in the backward\n" in text and "moved twice     args[0], again in the backward\n" in text


def test_names_are_those_of_the_user() -> None:
    plan = with_moves(gathered("w", ("mm", 1)))
    found = plan.why_collective(0)
    assert found.producer.node == "lin.weight" and "plan.explain('lin.weight', 'RR')" in str(found) and "lin_weight" not in str(found)
    assert "value w (lin.weight), all_gather" in str(found)
    assert found.text(shell=True).endswith("fxshard plan ... --explain 'lin.weight=RR' says what that would cost.")


def test_the_question_about_a_gradient_names_its_parameter() -> None:
    plan = dataclasses.replace(small_plan(), outputs=(PlanEnd("gradient", "lin.weight", "mm"),))
    assert "\nplan.explain('lin.weight') says what other layouts of it, and so of its gradient, would cost." in str(plan.why_collective(0))


def test_the_result_of_a_module_has_the_name_of_the_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x).cos()

    pins = {"block": "S(0)", "cos": "R"}
    plan = fxshard.plan(Model(), (torch.ones(4, 8),), MESH, pins=pins, input_layouts="S(0)", cache=False, train=False)
    assert plan.origin is not None
    assert [plan.origin.module_of(node) for node in ("relu", "add", "cos")] == ["block", "block.0", None]
    found = plan.why_collective(0)
    assert found.collective.value == "relu" and found.name == "block"
    (question,) = found.questions
    assert plan.explain(question.name, question.layout).choices[0].reason == "the pins of this plan exclude it"
    assert dataclasses.replace(plan).why_collective(0).name == "relu"  # a copy does not know the model


@pytest.mark.parametrize("count", [1, 40])
def test_many_readers_are_counted(count: int) -> None:
    plan = with_moves(gathered("w", *((f"a_reader_of_the_weights_{k}", 1) for k in range(count))))
    assert ("more" in plan.why_collective(0).remedy) == (count > 1)
