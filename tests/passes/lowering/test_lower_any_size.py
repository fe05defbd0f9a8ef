"""A program lowered with symbolic sizes equals, at any sizes, the program lowered for these sizes, and computes what one device does."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes.any_size import CASES, calls, traced

import fxshard
from fxshard.errors import SizesError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.after_lowering import optimise
from fxshard.passes.after_lowering.schedule import predicted
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.annotation.recompute import expand
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import lower_plan
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan

MESHES = [{"a": 2}, {"a": 2, "b": 2}, {"a": 3}]


@pytest.mark.parametrize("name, mesh", [*(("perceptron", mesh) for mesh in MESHES), ("one layer", MESHES[1])], ids=str)
def test_even_sizes_equal_the_program_lowered_for_them(name: str, mesh: dict[str, int]) -> None:
    """Node by node, with the bytes of every collective and the predicted time, for random plans."""
    _, graph = traced(name, 12, 12)
    assert graph.family is not None
    annotated = annotate(graph, fxshard.Mesh(mesh))
    plan = random_graph_plan(annotated, 0)
    program = lower(graph, plan)
    example = predicted(program).total  # what is cached for these sizes must not serve others
    for batch, seq in ((12, 12), (36, 24)):
        sizes = {dim.name: {"batch": batch, "seq": seq}[dim.name] for dim in graph.family.dims}
        there = replace(graph, module=graph.family.at(sizes), family=None)
        at, want = program_at(program, sizes), lower_at(there, plan)
        assert at.classes.keys() == want.classes.keys()
        for coordinate in at.classes:
            assert calls(at.local(coordinate).graph) == calls(want.local(coordinate).graph)
        assert at.collectives == want.collectives
        assert predicted(at).total == pytest.approx(predicted(want).total)
        assert (batch, seq) == (12, 12) or predicted(at).total > example
        assert (at.input_shapes, at.output_shapes) == (want.input_shapes, want.output_shapes)


def lower_at(graph: PlanningGraph, plan: fxshard.ShardingPlan) -> ShardedProgram:
    """Lowers a graph of numeric sizes without verifying the plan, whose shapes are those of another size."""
    from fxshard.passes.lowering import lower as module

    return module._lower_at(expand(graph, plan.recomputed), plan)


def equals_one_device(program: ShardedProgram, name: str, model: torch.nn.Module, batch: int, seq: int) -> bool:
    """Simulates ``program`` at these sizes and compares it with one device; False if it refuses them."""
    args = CASES[name][1](batch, seq)
    sizes = sizes_of_call(program, args, {})
    if program.refuses(sizes) is not None:
        with pytest.raises(SizesError):
            program_at(program, sizes)
        return False
    at = program_at(program, sizes)
    result = simulate_program(at, program_values(at, model, args))
    assert_equal_to_one_device(result, one_device(copy.deepcopy(model), args))
    return True


@pytest.mark.parametrize("examples", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_uneven_sizes_equal_one_device(examples: int) -> None:
    model, graph = traced("perceptron", 7, 9, uneven=True)
    annotated = annotate(graph, fxshard.Mesh({"a": 2, "b": 2}))

    def check(seed: int, batch: int, seq: int) -> None:
        assert equals_one_device(lower_plan(graph, random_graph_plan(annotated, seed)), "perceptron", model, batch, seq)

    cases = given(st.integers(0, 1000), st.integers(1, 13), st.integers(1, 13))(check)
    settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])(cases)()


@pytest.mark.parametrize("seed", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_nested_chunks_of_unequal_lengths(seed: int) -> None:
    model, graph = traced("flattened", 6, 6, uneven=True)
    program = lower_plan(graph, random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2, "b": 2})), seed))
    assert all(equals_one_device(program, "flattened", model, *sizes) for sizes in ((7, 7), (7, 5), (9, 11), (1, 3), (1, 1)))


@pytest.mark.parametrize("name", ["one layer", pytest.param("llama", marks=pytest.mark.slow)])
def test_one_program_serves_every_size(name: str) -> None:
    """One row, of which the second rank has none, is such a size too."""
    model, graph = traced(name, 5, 7, uneven=True)
    program = lower_plan(graph, random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2})), 1))
    assert len(program.modules) == 1  # one for all ranks
    assert not program.guards
    assert all(equals_one_device(program, name, model, *sizes) for sizes in ((5, 7), (4, 8), (1, 8), (8, 1), (1, 1)))


def test_an_even_program_refuses_odd_sizes_by_name() -> None:
    _, graph = traced("perceptron", 6, 1)
    plan = random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2})), 0)
    program = lower_plan(graph, plan)
    (size,) = program.sizes
    assert size.unit == 2
    assert program.refuses({"batch": 7}) == "batch is 7, shards are even at multiples of 2 only"
    with pytest.raises(SizesError, match="batch is 7"):
        program_at(program, {"batch": 7})


def test_a_condition_that_a_pass_evaluates_is_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(program: ShardedProgram) -> ShardedProgram:
        assert program.sizes[0].value > 3
        return program

    _, graph = traced("perceptron", 6, 1, uneven=True)
    plan = random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2})), 0)
    assert lower_plan(graph, plan).refuses({"batch": 2}) is None
    _, graph = traced("perceptron", 6, 1, uneven=True)
    monkeypatch.setitem(optimise.OPTIMISATIONS, "schedule", asks)
    program = lower_plan(graph, plan)
    assert [guard.condition for guard in program.guards] == ["batch > 3"] and program.refuses({"batch": 4}) is None
    assert "batch > 3" in (program.refuses({"batch": 2}) or "")


def test_passes_that_need_numeric_sizes_are_left_out_with_a_reason() -> None:
    _, graph = traced("perceptron", 6, 1)
    program = lower_plan(graph, random_graph_plan(annotate(graph, fxshard.Mesh({"a": 2})), 0))
    left = {effect.name: effect.left_out for effect in program.effects}
    assert "sizes are symbols" in (left["chunk"] or "")
