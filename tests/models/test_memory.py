"""The predicted peak of a lowered program is the measured peak of its eager aten execution."""

from __future__ import annotations

import pytest
from equality import MESHES, mesh_of, prepared
from zoo import MODELS

from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.pipeline import Request, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram
from fxshard.runtime.rank_graph.memory import program_memory
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.memory import measure_memory
from fxshard.testing.random_plan import random_graph_plan

SLICE = [
    ("mlp", "a=2,b=2", None, True),
    ("mlp_batch5", "a=4", 0, True),
    ("mlp_batch5", "a=2", 1, False),
    ("cnn", "a=2", None, True),
    ("cnn", "a=2,b=2", 3, False),
    ("llama_batch5", "a=2", None, True),
]


def check(name: str, mesh: str, seed: int | None, train: bool) -> float:
    """The worst ratio of predicted and measured peak over size classes, for a random plan or, if ``seed`` is None, the solver's.

    Also checks that the memory the solver's plan predicts before lowering is near.
    """
    (model, args, kwargs), graph, _ = prepared(name)
    graph = graph if train else trace(model, args, kwargs, train=False)
    where = mesh_of(mesh)
    plan = plan_graph(graph, where, Request()) if seed is None else random_graph_plan(annotate(graph, where), seed)
    program: ShardedProgram = lower(graph, plan)
    values = program_values(program, model, args, kwargs)
    worst = 1.0
    for coordinate in {program.classes[c]: c for c in where.coordinates()}.values():
        ratio = program_memory(program, coordinate=coordinate).peak / measure_memory(program, values, coordinate).peak
        worst = max(worst, ratio, 1 / ratio)
    assert seed is not None or sum(plan.memory.values()) == pytest.approx(program_memory(program).peak, rel=0.2)
    return worst


@pytest.mark.parametrize(("name", "mesh", "seed", "train"), SLICE)
def test_predicted_peak_is_the_measured_one(name: str, mesh: str, seed: int | None, train: bool) -> None:
    assert check(name, mesh, seed, train) < 1.01


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_sweep(name: str, mesh: str) -> None:
    for train in (True, False):
        for seed in (None, *range(5)):
            assert check(name, mesh, seed, train) < 1.1
