"""All-to-alls in place of reduce-scatters: simulated results stay the same, and so does the order of collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx

from fxshard.layout.layouts import Layout
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.program.sharded_program import KINDS, ShardedProgram, is_collective
from fxshard.runtime.groups.reduce_scatter import issued_kind, replace_by_all_to_all
from fxshard.runtime.rank_graph.bind import bind_graph
from fxshard.runtime.simulate.shards import scatter
from fxshard.runtime.simulate.simulate import Recorded, run_lockstep
from fxshard.runtime.simulate.values import program_values
from fxshard.testing.random_plan import random_graph_plan
from tests.models import zoo

CASES = [("mlp_batch5", "a=3", 3), ("llama_batch5", "a=2,b=2", 1), ("mlp", "a=2,b=3", 1)]


def exchanged(program: ShardedProgram) -> ShardedProgram:
    """``program`` with an all-to-all in place of each reduce-scatter."""
    modules = {}
    for key, module in program.modules.items():
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in [n for n in graph.nodes if KINDS.get(n.target) == "reduce_scatter"]:
            replace_by_all_to_all(graph, node)
        graph.lint()
        modules[key] = fx.GraphModule(torch.nn.Module(), graph)
    return program.with_modules(modules, program.collectives)


def results(program: ShardedProgram, values: list[torch.Tensor]) -> tuple[dict[tuple[int, ...], Any], list[Recorded]]:
    mesh: Mesh = program.mesh
    layouts: tuple[Layout, ...] = program.input_layouts
    inputs = {c: [scatter(v, layout, mesh, c) for v, layout in zip(values, layouts, strict=True)] for c in mesh.coordinates()}
    return run_lockstep(program, inputs)


@pytest.mark.parametrize(("name", "mesh", "seed"), CASES)
def test_the_same_numbers_and_order(name: str, mesh: str, seed: int) -> None:
    model, args, kwargs = zoo.make(name)
    graph = trace(model, args, kwargs)
    program = lower(graph, random_graph_plan(annotate(graph, parse_mesh(mesh)), seed))
    kinds = [c.kind for c in program.collectives]
    assert kinds.count("reduce_scatter") > 2, "the program must have reduce-scatters"
    tangents = [torch.ones(s, dtype=torch.float64) for s in program.output_shapes][: len(graph.inputs_of("tangent"))]
    values = program_values(program, model, args, kwargs, tangents)
    want, ran = results(program, values)
    have, instead = results(exchanged(program), values)
    assert [issued_kind("gloo", r.kind) for r in ran] == [r.kind for r in instead]
    assert [(r.axis, r.shape, r.dtype) for r in ran] == [(r.axis, r.shape, r.dtype) for r in instead]
    for coordinate, own in want.items():
        torch.testing.assert_close(have[coordinate], own, rtol=1e-12, atol=1e-12)


def test_only_axes_whose_backend_lacks_reduce_scatter_change() -> None:
    model, args, kwargs = zoo.make("mlp")
    graph = trace(model, args, kwargs)
    program = lower(graph, random_graph_plan(annotate(graph, parse_mesh("a=2,b=3")), 1))
    (module, *_) = program.modules.values()
    axes = {"a": "a", "b": "b"}

    def kinds(backends: Mapping[str, str] | None) -> list[tuple[str, str]]:
        return [(KINDS[n.target], n.args[-1]) for n in bind_graph(module, axes, backends)[0].graph.nodes if is_collective(n)]

    whole = kinds(None)
    assert kinds({"a": "nccl", "b": "nccl"}) == whole and {axis for kind, axis in whole if kind == "reduce_scatter"} == {"a", "b"}
    assert kinds({"a": "gloo", "b": "nccl"}) == [(issued_kind("gloo", kind) if axis == "a" else kind, axis) for kind, axis in whole]
