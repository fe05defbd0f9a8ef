"""The predicted workspace of redistributions is what they allocate when they run, counted by storages."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx

from fxshard.cost.workspace import peak_bytes
from fxshard.layout.folded_paths import folded_paths
from fxshard.layout.layouts import Layout, all_layouts, ceil_shape
from fxshard.layout.redistribution import bytes_price, path_table_for, walk
from fxshard.layout.steps import reductions_commute
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.emit import emit_step
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.memory import workspace

FEW = (Mesh({"a": 4}), Mesh({"a": 2, "b": 3}))
MESHES = (*FEW, Mesh({"a": 18}), Mesh({"a": 4, "b": 5}))
VALUES = {
    "even": torch.empty(24, 12),
    "uneven": torch.empty(7, 13, 5),
    "with gaps": torch.empty(12, 24).t(),
    "bools": torch.empty(9, 8, dtype=torch.bool),
    "wide": torch.empty(12, 7, dtype=torch.float64),
}


def measured(value: torch.Tensor, path: list, mesh: Mesh) -> tuple[int, int]:
    """(peak bytes while the path runs on the first rank, whose input stays alive; bytes of the result's storage)."""
    local = LocalGraph(mesh, (0,) * mesh.ndim)
    shape = tuple(value.shape)
    shard = ceil_shape(shape, path[0][0], mesh.shape)
    order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
    given = torch.empty([shard[d] for d in order], dtype=value.dtype, device="meta").permute([order.index(d) for d in range(len(order))])
    x = local.placeholder("x", shard, value)
    x.meta["val"] = given
    for layout, step, _ in path:
        x, _ = emit_step(local, x, step, layout, shape)
    env = {n: given if n.op == "placeholder" else torch.empty((), dtype=torch.int64, device="meta") for n in local.graph.nodes}

    def run() -> list[torch.Tensor]:
        for node in local.graph.nodes:
            if node.op == "call_function" and "axis_index" not in str(node.target):
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                made = kwargs if "device" in kwargs or "arange" not in str(node.target) else {**kwargs, "device": "meta"}
                env[node] = node.target(*args, **made)
        return [env[x]]

    return peak_bytes(run, [(given, False)]), env[x].untyped_storage().nbytes()


def bytes_at_ends(value: torch.Tensor, have: Layout, want: Layout, mesh: Mesh) -> list[int]:
    return [torch.Size(ceil_shape(value.shape, at, mesh.shape)).numel() * value.dtype.itemsize for at in (have, want)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_redistributions(name: str, mesh: Mesh) -> None:
    """For random pairs of layouts the prediction is an upper bound. It is exact if the path has one step and the input no gaps."""
    value, draw = VALUES[name], random.Random(name)
    ops = ("sum", "avg", "max") if value.is_floating_point() else ()
    layouts = list(filter(reductions_commute, all_layouts(value.dim(), mesh.shape, ops)))
    paths = path_table_for(layouts, tuple(value.shape), value.dtype.itemsize, mesh, bytes_price)
    for have, want in (draw.sample(layouts, 2) for _ in range(60)):
        path = list(walk(have, paths.steps(have, want)))
        said, behind = workspace.of_move(value, have, [step for _, step, _ in path], mesh)
        assert (said, behind) == tuple(found[0, 1] for found in workspace.of_moves(value, paths, [have, want]))
        ends = bytes_at_ends(value, have, want, mesh)
        most, result = measured(value, path, mesh)
        most = max(most, sum(ends) + behind)  # some steps return their input
        exact = len(path) == 1 and (value.is_contiguous() or mesh in FEW)
        assert most <= said + sum(ends) + behind <= most + (0 if exact else sum(ends) + behind), f"{have} -> {want}"
        assert ends[1] + behind == result or not path, f"{have} -> {want}"


@pytest.mark.parametrize("mesh", (*MESHES[1:], Mesh({"a": 2, "b": 2, "c": 2})), ids=str)
@pytest.mark.parametrize("name", VALUES)
def test_steps_of_folded_paths(name: str, mesh: Mesh) -> None:
    """For a single step the prediction is exact; for an input with gaps it is an upper bound."""
    value = VALUES[name]
    ops = ("sum", "avg") if value.is_floating_point() else ()
    layouts = list(filter(reductions_commute, all_layouts(value.dim(), mesh.shape, ops)))
    edges = list(dict.fromkeys(edge for way in folded_paths(layouts, value.dim(), range(mesh.ndim)) for edge in way))
    for layout, step, after in random.Random(name).sample(edges, min(50, len(edges))):
        said, behind = workspace.of_move(value, layout, [step], mesh)
        ends = sum(bytes_at_ends(value, layout, after, mesh)) + behind
        most, result = measured(value, [(layout, step, after)], mesh)
        most = max(most, ends)
        assert most == said + ends or (not value.is_contiguous() and most < said + ends), f"{step} from {layout}"
        assert result == behind + bytes_at_ends(value, layout, after, mesh)[1]
