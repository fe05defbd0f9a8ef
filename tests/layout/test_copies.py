"""Copies around collectives: what a price counts is what the lowered steps write."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from fxshard.layout.layouts import Layout, all_layouts, ceil_shape, local_shape
from fxshard.layout.redistribution import Step, single_step, steps, walk
from fxshard.layout.steps import written_between
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.passes.lowering.emit import emit_step
from fxshard.passes.lowering.local_graph import LocalGraph
from tests.moved import pairs, run

L = Layout.parse
COPIES = {"cat", "stack", "clone"}


def copied(graph: fx.Graph) -> int:
    """Bytes that the operators of a graph copy."""
    made = [n.meta["val"] for n in graph.nodes if n.op == "call_function" and str(n.target).split(".")[1] in COPIES]
    return sum(one.numel() * one.element_size() for one in made)


def emitted(path: list[tuple[Layout, Step, Layout]], shape: tuple[int, ...], mesh: Mesh) -> fx.Graph:
    """The steps of a path on the first rank."""
    origin = (0,) * mesh.ndim
    local = LocalGraph(mesh, origin)
    given = local_shape(shape, path[0][0], mesh.shape, origin)
    x = local.placeholder("x", given, torch.empty(given))
    for layout, step, _ in path:
        x, _ = emit_step(local, x, step, layout, shape)
    local.graph.output(x)
    return local.graph


def priced(path: list[tuple[Layout, Step, Layout]], shape: tuple[int, ...], mesh: Mesh) -> int:
    """Bytes of the copies around the collectives of a path."""
    found = 0
    for layout, step, after in path:
        before, result = (ceil_shape(shape, at, mesh.shape) for at in (layout, after))
        found += written_between(step, layout, before, result, 4) if step.is_collective else 0
    return found


def is_even(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether all ranks hold equal shards."""
    local = ceil_shape(shape, layout, mesh.shape)
    return all(size * math.prod(mesh.shape[a] for a in layout.held_on(dim)) == shape[dim] for dim, size in enumerate(local))


@pytest.mark.parametrize(
    ("axes", "shape"), [("a=4", (8, 4)), ("a=4", (1, 8, 4)), ("a=2,b=2", (4, 8)), ("a=2,b=2", (1, 4, 8)), ("a=2,b=2,c=2", (8, 16))]
)
def test_a_price_counts_the_copies_of_the_lowered_steps(axes: str, shape: tuple[int, ...]) -> None:
    """On even shards, through plain and folded layouts; uneven ones are padded and cut besides."""
    mesh, checked = parse_mesh(axes), 0
    even = [layout for layout in all_layouts(len(shape), mesh.shape) if is_even(layout, shape, mesh)]
    for source, targets in pairs(even, 400).items():
        for target in targets:
            path = list(walk(source, steps(source, target, shape, 4, mesh)))
            if any(step.is_collective for _, step, _ in path) and all(is_even(after, shape, mesh) for *_, after in path):
                assert copied(emitted(path, shape, mesh)) == priced(path, shape, mesh), f"{source} -> {target} by {path}"
                checked += 1
    assert checked >= 9


@pytest.mark.parametrize(
    ("way", "shape", "copies"),
    [
        ("S(0) R", (8, 4), 0),
        ("S(1) R", (8, 4), 1),
        ("S(1) R", (1, 8, 4), 0),
        ("S(2) R", (1, 8, 4), 1),
        ("P S(0)", (8, 4), 0),
        ("P S(1)", (8, 4), 1),
        ("P S(1)", (1, 8, 4), 0),
        ("P R", (8, 4), 0),
        ("S(0) S(1)", (8, 4), 1 / 4),
        ("S(1) S(2)", (2, 8, 4), 2 / 4),
    ],
)
def test_copies_by_hand(way: str, shape: tuple[int, ...], copies: float) -> None:
    """Whole tensors that one of four ranks copies: the blocks of the first dim that is longer than 1 adjoin, those of others do not."""
    source, target = map(L, way.split())
    mesh, step = parse_mesh("a=4"), single_step(0, source[0], target[0])
    assert step is not None
    assert priced([(source, step, target)], shape, mesh) == copies * math.prod(shape) * 4
    run(source, [(step,)], shape, mesh)
