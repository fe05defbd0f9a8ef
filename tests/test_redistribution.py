"""Redistribution: every pair of layouts, run rank by rank against whole tensors; bytes by formula; paths by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import pytest
from torch import fx
from torch.distributed.tensor import Partial, Shard

from fxshard.cost import time_price
from fxshard.layout import Layout, all_layouts
from fxshard.mesh import Mesh, parse_mesh
from fxshard.passes.emit import emit_step
from fxshard.passes.local_graph import LocalGraph
from fxshard.redistribution import Price, Step, bytes_price, path_price, sent_bytes, single_step, step_price, steps, walk
from fxshard.runtime.simulate import Recorded, run_lockstep
from fxshard.sharding_plan import Redistribution, ShardingPlan
from tests.reference_shards import assert_is_sharded, coordinates, draw_shards

L = Layout.parse
PAIRS_A_CASE = 500
"""Above this many pairs of layouts a fixed sample is taken."""


@dataclass
class Ranks:
    """What run_lockstep needs of a program: one graph a rank."""

    mesh: Mesh
    graphs: dict[tuple[int, ...], fx.GraphModule]

    def local(self, coordinate: tuple[int, ...]) -> fx.GraphModule:
        return self.graphs[coordinate]


def run(source: Layout, targets: Iterable[Layout], shape: tuple[int, ...], mesh: Mesh) -> list[Recorded]:
    """Redistributes one tensor to each target on all ranks and compares with the whole tensor; returns what was issued."""
    targets = list(targets)
    whole, shards = draw_shards(shape, source, mesh.shape, seed=len(targets))
    graphs = {}
    for c in coordinates(mesh.shape):
        local = LocalGraph(mesh, c)
        x = local.placeholder("x", shards[c].shape, shards[c])
        results = [_emitted(local, x, source, target, shape) for target in targets]
        local.graph.output(tuple(results))
        graphs[c] = local.finish()
    out, recorded = run_lockstep(Ranks(mesh, graphs), {c: [s.contiguous()] for c, s in shards.items()})  # type: ignore[arg-type]  # only what run_lockstep reads
    for k, target in enumerate(targets):
        assert_is_sharded(whole, {c: r[k] for c, r in out.items()}, target, mesh.shape, f"{source} -> {target} of {shape} on {mesh},")
    return recorded


def _emitted(local: LocalGraph, x: fx.Node, source: Layout, target: Layout, shape: tuple[int, ...]) -> fx.Node:
    for layout, step, _ in walk(source, steps(source, target, shape, 8, local.mesh)):
        x, _ = emit_step(local, x, step, layout, shape)
    return x


def pairs(shape: tuple[int, ...], mesh: Mesh, ops: tuple[str, ...]) -> dict[Layout, list[Layout]]:
    """Source -> targets: all of them, or a fixed sample."""
    every = list(itertools.product(all_layouts(len(shape), mesh.ndim, ops), repeat=2))
    if len(every) > PAIRS_A_CASE:
        every = random.Random(0).sample(every, PAIRS_A_CASE)
    found: dict[Layout, list[Layout]] = {}
    for source, target in every:
        found.setdefault(source, []).append(target)
    return found


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ("a=4", (8, 4)),
        ("a=4", (6, 3)),
        ("a=4", (5, 2, 3)),
        ("a=4", ()),
        ("a=2,b=2", (4,)),
        ("a=2,b=2", (8, 4)),
        ("a=2,b=2", (5, 3)),
        ("a=2,b=2", (3, 2, 5)),
        ("a=2,b=3", (6, 12)),
        ("a=2,b=3", (7, 5)),
        ("a=3,b=2", (4, 1)),
        ("a=2,b=2,c=2", (8, 8)),
        ("a=2,b=2,c=2", (9, 3)),
    ],
)
def test_every_pair_of_layouts(axes: str, shape: tuple[int, ...]) -> None:
    for source, targets in pairs(shape, parse_mesh(axes), ("sum",)).items():
        run(source, targets, shape, parse_mesh(axes))


@pytest.mark.parametrize("ops", [("avg",), ("max",), ("min",), ("product",), ("sum", "avg")], ids="+".join)
@pytest.mark.parametrize(("axes", "shape"), [("a=4", (8, 4)), ("a=4", (5, 3)), ("a=2,b=3", (7,))])
def test_every_reduction(axes: str, shape: tuple[int, ...], ops: tuple[str, ...]) -> None:
    for source, targets in pairs(shape, parse_mesh(axes), ops).items():
        run(source, targets, shape, parse_mesh(axes))


@lru_cache
def probes(axes: str, ndim: int) -> list[tuple[Layout, Layout]]:
    return random.Random(1).sample(list(itertools.product(all_layouts(ndim, parse_mesh(axes).ndim), repeat=2)), 60)


@pytest.mark.parametrize("axes", ["a=2,b=3", "a=2,b=2,c=2"])
def test_a_step_changes_one_axis_and_never_an_outer_one(axes: str) -> None:
    """Shards of a dim are nested in mesh order: an axis may enter or leave a dim only while no later axis cuts it."""
    mesh = parse_mesh(axes)
    for source, target in probes(axes, 2):
        layout = source
        for before, step, after in walk(source, steps(source, target, (12, 12), 4, mesh)):
            assert before == layout
            assert [a for a, (p, q) in enumerate(zip(before, after, strict=True)) if p != q] == [step.axis]
            assert (step.source, step.target) == (before[step.axis], after[step.axis])
            moved = {p.dim for p in (step.source, step.target) if isinstance(p, Shard)}
            assert not moved & {p.dim for p in before[step.axis + 1 :] if isinstance(p, Shard)}
            layout = after
        assert layout == target


@pytest.mark.parametrize("price", [bytes_price, time_price(parse_mesh("a=4", "h100"))], ids=["bytes", "time"])
@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        ("S(0)", "S(1)", ["all_to_all"]),
        ("P", "S(1)", ["reduce_scatter"]),
        ("P(avg)", "S(0)", ["reduce_scatter"]),
        ("P", "R", ["all_reduce"]),
        ("P(max)", "R", ["all_reduce"]),
        ("S(1)", "R", ["all_gather"]),
        ("R", "S(0)", ["slice"]),
        ("R", "P", ["to_partial"]),
        ("S(0)", "P", ["all_gather", "to_partial"]),
        ("R", "R", []),
        ("S(0)", "S(0)", []),
    ],
)
def test_known_paths_on_one_axis(source: str, target: str, kinds: list[str], price: Price) -> None:
    found = steps(L(source), L(target), (1024, 512), 4, parse_mesh("a=4", "h100"), price)
    assert [s.kind for s in found] == kinds


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_of_even_shards_are_the_ring_formulas(n: int) -> None:
    """all-reduce 2(n-1)/n N, all-gather and reduce-scatter (n-1)/n N, all-to-all (n-1)/n of the local N."""
    mesh, shape, itemsize = Mesh({"a": n}), (16, 24), 4
    whole = math.prod(shape) * itemsize
    expected = {"PR": 2 * (n - 1) / n * whole, "RS": 0, "RP": 0}
    expected |= {"S(0)R": (n - 1) / n * whole, "S(1)R": (n - 1) / n * whole, "PS(0)": (n - 1) / n * whole, "PS(1)": (n - 1) / n * whole}
    expected |= {"S(0)S(1)": (n - 1) / n * whole / n, "S(1)S(0)": (n - 1) / n * whole / n, "RS(1)": 0}
    for both, sent in expected.items():
        source, target = L(both.replace("RS", "RS(0)") if both == "RS" else both)
        step = single_step(0, source, target)
        assert step is not None
        assert sent_bytes(step, Layout([source]), shape, itemsize, mesh) == sent, both


def test_bytes_on_one_axis_of_a_mesh_count_the_shard_that_the_others_left() -> None:
    mesh, step = Mesh({"a": 2, "b": 4}), single_step(1, L("P")[0], L("R")[0])
    assert step is not None
    assert sent_bytes(step, L("S(0)P"), (16, 8), 4, mesh) == 2 * 3 / 4 * (16 * 8 * 4 / 2)
    assert sent_bytes(step, L("RP"), (16, 8), 4, mesh) == 2 * 3 / 4 * (16 * 8 * 4)


@pytest.mark.parametrize(("axes", "shape"), [("a=4", (8, 4)), ("a=4", (6, 3)), ("a=2,b=3", (7, 5)), ("a=2,b=2", (3, 2, 5))])
def test_predicted_bytes_are_those_of_the_buffers_issued(axes: str, shape: tuple[int, ...]) -> None:
    """By the ring forms, of the buffer that a rank hands in; the plan's list of collectives foretells each buffer."""
    mesh = parse_mesh(axes)
    for source, targets in pairs(shape, mesh, ("sum",)).items():
        entries = [Redistribution("x", shape, 8, source, t, steps(source, t, shape, 8, mesh), ()) for t in targets]
        planned = ShardingPlan(mesh, False, "", (), tuple(entries)).collectives
        issued = run(source, targets, shape, mesh)
        assert [(c.kind, c.axis) for c in planned] == [(c.kind, c.axis) for c in issued]
        for plan, real in zip(planned, issued, strict=True):
            n, held = mesh.shape[mesh.axis(real.axis)], math.prod(real.shape) * 8
            factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1}.get(real.kind, (n - 1) / n)
            assert plan.bytes == math.ceil(factor * held - 1e-9)
            assert math.prod(plan.buffer) * 8 == held


def brute_force(source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh, price: Price, most: int = 4) -> float:
    """The least price of any sequence of up to ``most`` steps, each legal on nested shards."""
    placements = [L("R")[0], L("P")[0], *(Shard(d) for d in range(len(shape)))]
    best = {source: 0.0}
    for _ in range(most):
        reached = dict(best)
        for layout, paid in best.items():
            for axis, wanted in itertools.product(range(mesh.ndim), placements):
                dims = {p.dim for p in (layout[axis], wanted) if isinstance(p, Shard)}
                nested = dims & {p.dim for p in layout[axis + 1 :] if isinstance(p, Shard)}
                step = single_step(axis, layout[axis], wanted)
                if wanted == layout[axis] or nested or step is None:
                    continue
                after = layout.with_axis(axis, wanted)
                total = paid + step_price(step, layout, shape, 4, mesh, price)
                reached[after] = min(total, reached.get(after, math.inf))
        best = reached
    return best.get(target, math.inf)


@pytest.mark.parametrize("kind", ["bytes", "time"])
@pytest.mark.parametrize(
    ("axes", "shape"), [("a=4", (8, 4)), ("a=4", (6, 3)), ("a=2,b=3", (12, 6)), ("a=2,b=3", (7, 5)), ("a=2,b=2,c=2", (16, 8))]
)
def test_no_path_of_up_to_four_steps_is_cheaper(axes: str, shape: tuple[int, ...], kind: str) -> None:
    mesh = parse_mesh(axes, "h100")
    price = bytes_price if kind == "bytes" else time_price(mesh)
    cases = list(itertools.product(all_layouts(2, mesh.ndim), repeat=2))
    for source, target in random.Random(2).sample(cases, min(len(cases), 40)):
        paid = path_price(source, target, shape, 4, mesh, price)
        assert paid <= brute_force(source, target, shape, mesh, price) + 1e-6, f"{source} -> {target}"


def test_single_steps_are_all_there_are() -> None:
    """Between unlike placements there is a step, but for shards and pending values to pending ones."""
    placements = [*L("RS(0)S(1)P"), Partial("max")]
    without = {(p, q) for p, q in itertools.product(placements, repeat=2) if p != q and single_step(0, p, q) is None}
    assert without == {(p, q) for p in placements if not p.is_replicate() for q in placements if isinstance(q, Partial) and p != q}
    assert Step("all_to_all", 0, *L("S(0)S(1)")).describe(Mesh({"tp": 2})) == "all_to_all(tp: S(0)->S(1))"
