"""A program that was tampered with is refused: wrong shapes of inputs, collectives that differ between ranks, missing waits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxshard
from fxshard.errors import PlanError, TraceError
from fxshard.graph.planning_graph import GraphOutput, PlanningGraph
from fxshard.mesh.mesh import Mesh
from fxshard.passes.annotation.verify import verify_graph
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import ShardedProgram, is_collective, is_wait
from fxshard.program.verify_program import verify_program

MESH = Mesh({"a": 2})
PINS = {"0.weight": "S(0)", "2.weight": "S(1)", "args[0]": "S(0)"}


def program() -> ShardedProgram:
    """Five rows over two ranks: two size classes."""
    model, args = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 8)), (torch.ones(5, 8),)
    plan = fxshard.plan(model, args, MESH, pins=PINS, output_layouts="R")
    return fxshard.lower(model, args, plan)


def tail(program: ShardedProgram) -> fx.GraphModule:
    return program.local((1,))


def another_collective(program: ShardedProgram) -> None:
    node = next(n for n in tail(program).graph.nodes if is_collective(n))
    node.args = (*node.args[:-1], "b")


def missing_wait(program: ShardedProgram) -> None:
    node = next(n for n in tail(program).graph.nodes if is_wait(n))
    node.replace_all_uses_with(node.args[0])
    tail(program).graph.erase_node(node)


def another_shape(program: ShardedProgram) -> None:
    node = next(n for n in tail(program).graph.nodes if n.op == "placeholder")
    node.meta["val"] = torch.empty(3, 3, device="meta")


def another_dtype(program: ShardedProgram) -> None:
    (node, *_) = tail(program).graph.output_node().args[0]
    node.meta["val"] = node.meta["val"].double()


def missing_result(program: ShardedProgram) -> None:
    output = tail(program).graph.output_node()
    output.args = (output.args[0][1:],)


def other_size_classes(program: ShardedProgram) -> None:
    classes: Any = program.classes
    classes[(1,)] = ((7,),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_collective, "size classes issue different collectives"),
        (missing_wait, "must be read by one wait"),
        (another_shape, "is \\(3, 3\\)"),
        (another_dtype, "torch.float64, not"),
        (missing_result, "inputs or outputs, the program"),
        (other_size_classes, "other size classes than its ranks"),
    ],
)
def test_a_tampered_program_is_refused(change: Callable[[ShardedProgram], None], said: str) -> None:
    good = program()
    verify_program(good)
    change(good)
    with pytest.raises(PlanError, match=said):
        verify_program(good)


def test_a_pending_result_is_refused() -> None:
    good = program()
    with pytest.raises(PlanError, match=r"returned pending, in P"):
        verify_program(dataclasses.replace(good, output_layouts=(fxshard.Layout.parse("P"), *good.output_layouts[1:])))


def graph() -> PlanningGraph:
    return trace(nn.Linear(4, 2), (torch.ones(3, 4),))


def renamed(kind: str) -> Callable[[PlanningGraph], PlanningGraph]:
    def change(graph: PlanningGraph) -> PlanningGraph:
        outputs = tuple(GraphOutput(o.kind, "another" if o.kind == kind else o.name) for o in graph.outputs)
        return dataclasses.replace(graph, outputs=outputs)

    return change


def on_meta(graph: PlanningGraph) -> PlanningGraph:
    broken = copy.copy(graph)
    next(n for n in broken.nodes if n.op == "call_function").meta["val"] = torch.empty(1, device="meta")
    return broken


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda g: dataclasses.replace(g, inputs=g.inputs[1:]), "the graph's inputs are"),
        (lambda g: dataclasses.replace(g, outputs=g.outputs[1:]), "the number of the graph's results"),
        (renamed("gradient"), "nothing in the graph belongs to another"),
        (renamed("output"), r"nothing in the graph belongs to tangents"),
        (on_meta, "is planned on meta"),
    ],
)
def test_an_inconsistent_graph_is_refused(change: Callable[[PlanningGraph], PlanningGraph], said: str) -> None:
    good = graph()
    verify_graph(good)
    with pytest.raises(TraceError, match=said):
        verify_graph(change(good))
