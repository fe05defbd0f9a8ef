"""Simulates redistributions on all ranks, with one graph per size class as in a program, and compares with whole tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import Step, path_table_for, walk
from fxshard.layout.steps import bytes_price, reductions_commute
from fxshard.mesh.mesh import Mesh
from fxshard.passes.lowering.emit import emit_step
from fxshard.passes.lowering.local_graph import LocalGraph
from fxshard.passes.lowering.size_classes import cuts, size_classes
from fxshard.runtime.simulate.simulate import Recorded, run_lockstep
from tests.reference_shards import assert_is_sharded, draw_shards

Steps = tuple[Step, ...]


@dataclass
class Ranks:
    """Stands for a program in run_lockstep: one graph per rank."""

    mesh: Mesh
    graphs: dict[tuple[int, ...], fx.GraphModule]

    def local(self, coordinate: tuple[int, ...]) -> fx.GraphModule:
        return self.graphs[coordinate]


def run(source: Layout, paths: Sequence[Steps], shape: tuple[int, ...], mesh: Mesh) -> list[Recorded]:
    """Redistributes one tensor along each path on all ranks, compares with the whole tensor, and returns the collectives."""
    whole, shards = draw_shards(shape, source, mesh.shape, seed=len(paths))
    walks = [list(walk(source, path)) for path in paths]
    ends = [one[-1][2] if one else source for one in walks]
    classes = size_classes(cuts([(shape, source), *((shape, at) for one in walks for _, _, at in one)], mesh), mesh)
    graphs = {}
    for coordinate, size_class in classes.items():
        if size_class not in graphs:
            local = LocalGraph(mesh, coordinate)
            x = local.placeholder("x", shards[coordinate].shape, shards[coordinate])
            local.graph.output(tuple(_emitted(local, x, one, shape) for one in walks))
            graphs[size_class] = local.finish()
    ranks = Ranks(mesh, {c: graphs[size_class] for c, size_class in classes.items()})
    out, recorded = run_lockstep(ranks, {c: [s.contiguous()] for c, s in shards.items()})  # type: ignore[arg-type]  # only what run_lockstep reads
    for k, (end, path) in enumerate(zip(ends, paths, strict=True)):
        what = f"{source} -> {end} of {shape} on {mesh} by {[step.describe(mesh) for step in path]},"
        assert_is_sharded(whole, {c: r[k] for c, r in out.items()}, end, mesh.shape, what)
    return recorded


def _emitted(local: LocalGraph, x: fx.Node, path: Sequence[tuple[Layout, Step, Layout]], shape: tuple[int, ...]) -> fx.Node:
    for layout, step, _ in path:
        x, _ = emit_step(local, x, step, layout, shape)
    return x


def run_pairs(pairs: Mapping[Layout, Sequence[Layout]], shape: tuple[int, ...], mesh: Mesh) -> None:
    """Checks the path that sends least from each source to its targets, except for layouts that mix pending reductions."""
    for source, targets in pairs.items():
        good = [target for target in targets if reductions_commute(target)]
        if reductions_commute(source) and good:
            paths = path_table_for([source, *good], shape, 8, mesh, bytes_price)
            run(source, [paths.steps(source, target) for target in good], shape, mesh)


def pairs(layouts: Sequence[Layout], most: int | None = None) -> dict[Layout, list[Layout]]:
    """Source -> targets: all pairs, or a fixed sample of ``most`` pairs."""
    every = list(itertools.product(layouts, repeat=2))
    found: dict[Layout, list[Layout]] = {}
    for source, target in every if most is None or len(every) <= most else random.Random(0).sample(every, most):
        found.setdefault(source, []).append(target)
    return found
