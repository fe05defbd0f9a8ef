"""A small program lowered by hand: y = x @ w with the plan of tests.plans.small_plans.small_plan, with even or uneven rows of x."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.utils import _pytree as pytree

import fxshard.ops  # noqa: F401
from fxshard.graph.planning_graph import GraphInput, GraphOutput
from fxshard.layout.layouts import Layout, local_shape
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.program.sharded_program import ProgramCollective, ShardedProgram, SizeClass
from tests.plans.small_plans import MESH, L, small_plan

W, X, Y = L("RS(0)"), L("S(0)S(1)"), L("S(0)R")


def plan_with_rows(rows: int) -> ShardingPlan:
    plan = small_plan()
    shapes = {"x": ((rows, 8),), "mm": ((rows, 4),)}
    nodes = tuple(dataclasses.replace(n, shapes=shapes.get(n.name, n.shapes)) for n in plan.nodes)
    (move,) = plan.redistributions
    return dataclasses.replace(plan, nodes=nodes, redistributions=(dataclasses.replace(move, shape=(rows, 4)),))


def local_graph(coordinate: tuple[int, ...], rows: int) -> fx.GraphModule:
    """The graph of one rank: rows are padded to their ceil size around the all-reduce."""
    local = LocalGraph(MESH, coordinate)
    w = local.placeholder("w", _local((8, 4), W, coordinate), torch.empty(8, 4))
    x = local.placeholder("x", _local((rows, 8), X, coordinate), torch.empty(rows, 8))
    y = local.emit(torch.ops.fxshard.einsum.default, x, w, "bi,io->bo")
    missing = _local((rows, 4), Y, (0, 0))[0] - local.shape(y)[0]
    if missing:
        y = local.emit(torch.ops.aten.constant_pad_nd.default, y, [0, 0, 0, missing], 0)
    reduced = local.emit(torch.ops._c10d_functional.all_reduce.default, y, "sum", "tp")
    out = local.emit(torch.ops._c10d_functional.wait_tensor.default, reduced)
    if missing:
        out = local.emit(torch.ops.aten.slice.Tensor, out, 0, 0, local.shape(x)[0])
    local.graph.output((out,))
    return local.finish()


def _local(shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    return local_shape(shape, layout, MESH.shape, coordinate)


def small_program(rows: int = 6) -> ShardedProgram:
    plan = plan_with_rows(rows)
    classes: dict[tuple[int, ...], SizeClass] = {c: ((_local((rows, 8), X, c)[0],),) if rows % 2 else () for c in MESH.coordinates()}
    first = {size_class: coordinate for coordinate, size_class in reversed(classes.items())}
    modules = {size_class: local_graph(first[size_class], rows) for size_class in dict.fromkeys(classes.values())}
    buffer, sent = _local((rows, 4), Y, (0, 0)), plan.collectives[0].bytes
    return ShardedProgram(
        mesh=MESH,
        plan=plan,
        modules=modules,
        inputs=(GraphInput("w", "parameter", "lin.weight"), GraphInput("x", "input", "args[0]")),
        outputs=(GraphOutput("output", "outputs[0]"),),
        input_layouts=(W, X),
        output_layouts=(Y,),
        input_shapes=((8, 4), (rows, 8)),
        output_shapes=((rows, 4),),
        input_dtypes=("torch.float32", "torch.float32"),
        output_dtypes=("torch.float32",),
        in_spec=pytree.tree_structure(((0,), {})),
        out_spec=pytree.tree_structure({"logits": 0}),
        collectives=(ProgramCollective("all_reduce", "tp", sent, buffer, "torch.float32", "all_reduce_default", ((0, 0),)),),
        classes=classes,
        aliases={"head.weight": "lin.weight"},
    )
