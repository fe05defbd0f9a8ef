"""Slices with bounds computed from a dynamic size, under random plans: at other sizes they equal one device in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import FloorDiv, Max, Min

import fxshard
from fxshard._torch_compat.sizes.extremes import without_extremes
from fxshard._torch_compat.sizes.symbols import SymbolEnv, evaluated, plain, symbol_of
from fxshard.errors import SizesError
from fxshard.graph.planning_graph import PlanningGraph
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.lowering.at_sizes import program_at
from fxshard.passes.lowering.lower import lower
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values, sizes_of_call
from fxshard.shapes import dynamic_dims
from fxshard.testing.compare import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.passes.any_size import LinearThen, rows

SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "spectrum": lambda y: y[: y.shape[0] // 2 + 1],
    "third": lambda y: y[1 : y.shape[0] // 3 + 2],
    "middle": lambda y: y[y.shape[0] // 4 : 3 * y.shape[0] // 4 + 1],
    "few": lambda y: y[: min(y.shape[0], 5)] * 2,
    "halves": lambda y: torch.cat([-y[y.shape[0] // 2 :], y[: y.shape[0] // 2]]),
}


LINE, THREE, PLANE = {"a": 2}, {"a": 3}, {"a": 2, "b": 2}
CASES = [
    *((mesh, name, False) for mesh in (LINE, PLANE) for name in SLICES),
    *((LINE, name, True) for name in SLICES),
    *(pytest.param(THREE, name, False, marks=pytest.mark.slow) for name in SLICES),
    *(pytest.param(mesh, name, True, marks=pytest.mark.slow) for mesh in (THREE, PLANE) for name in SLICES),
]


@functools.cache
def traced(name: str, uneven: bool) -> tuple[LinearThen, PlanningGraph]:
    """The model and its graph, shared by all meshes."""
    model, example = LinearThen(SLICES[name]), rows(24)
    dims = tuple(replace(dim, uneven=uneven) for dim in dynamic_dims(model, (example,), {}, {"x": {0: "n"}}))
    return model, trace(model, (example,), dynamic=dims)


@pytest.mark.parametrize(("mesh", "name", "uneven"), CASES, ids=str)
def test_equal_to_one_device(mesh: dict[str, int], name: str, uneven: bool) -> None:
    """A plan that shards a dim which the mesh divides at no size is refused by name."""
    (model, graph), done = traced(name, uneven), 0
    annotated = annotate(graph, fxshard.Mesh(mesh))
    for seed in range(2):
        plan = random_graph_plan(annotated, seed)
        try:
            program = lower(annotated.graph, plan)
        except SizesError as error:
            assert not uneven and "uneven whatever the sizes" in str(error)
            continue
        for count in (1, 5, 12) if uneven else (12, 36):
            args = (rows(count),)
            at = program_at(program, sizes_of_call(program, args, {}))
            assert_equal_to_one_device(simulate_program(at, program_values(at, model, args)), one_device(copy.deepcopy(model), args))
            done += 1
    assert done or not uneven


def shifted(y: Tensor) -> Tensor:
    """Rows and columns, each moved by one, as T5 moves its targets."""
    out = torch.zeros_like(y)
    out[1:, 1:] = y[:-1, :-1]
    return out


def test_slices_to_the_end_name_the_size_of_the_dim() -> None:
    """Inductor compiles slice_scatter only if it can compare the end of the slice with the size of the dim."""
    model, example = LinearThen(shifted), rows(24)
    dims = tuple(replace(dim, uneven=True) for dim in dynamic_dims(model, (example,), {}, {"x": {0: "n"}}))
    graph = trace(model, (example,), dynamic=dims)
    annotated, found = annotate(graph, fxshard.Mesh(LINE)), []
    for seed in range(3):
        program = lower(annotated.graph, random_graph_plan(annotated, seed))
        nodes = [node for module in program.modules.values() for node in module.graph.nodes]
        found += [n.args[4] for n in nodes if n.target is torch.ops.aten.slice_scatter.default]
        args = (rows(12),)
        at = program_at(program, sizes_of_call(program, args, {}))
        assert_equal_to_one_device(simulate_program(at, program_values(at, model, args)), one_device(copy.deepcopy(model), args))
    assert found and 2**63 - 1 not in found


def test_sizes_do_not_grow_from_layer_to_layer() -> None:
    """Two swapped halves are together as long as before. Unsimplified, four layers make an expression of 3,000 characters."""
    model, example = LinearThen(lambda y: functools.reduce(lambda x, _: SLICES["halves"](x).tanh(), range(4), y)), rows(24)
    family = trace(model, (example,), dynamic=dynamic_dims(model, (example,), {}, {"x": {0: "n"}})).family
    assert family is not None
    shapes = {node.name: node.meta["val"].shape for node in family.module.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    n = family.symbols["n"]
    assert {plain(shapes[name][0]) for name in shapes if name.startswith("cat")} == {n}
    assert {plain(shape[0]) for name, shape in shapes.items() if name.startswith("slice_") and "back" not in name} == {
        FloorDiv(n, 2),
        n - FloorDiv(n, 2),
    }


def test_min_and_max_that_ranges_decide() -> None:
    """The simplified expression has the same value at every size. A Min or Max that the ranges do not decide stays."""
    env = SymbolEnv()
    n = symbol_of(env.symbol("n", 4, 1, 40))
    half = FloorDiv(n, 2) + 1
    settled = {
        Min(2 * n, n + 1): n + 1,
        Max(0, n - 1): n - 1,
        Min(n, half): half,
        Max(n, Min(half, 3 * n)): n,
        Min(4 * n, 7 + Min(n, 50)): None,
    }
    for expr, want in settled.items():
        found = without_extremes(expr, env.shape_env)
        assert found == want or (want is None and found.has(Min))
        for size in range(1, 41):
            assert evaluated(found, {n: sympy.Integer(size)}) == evaluated(expr, {n: sympy.Integer(size)})
    for expr in (Min(n, 5), Max(n, half + 3)):
        assert without_extremes(expr, env.shape_env) == expr
