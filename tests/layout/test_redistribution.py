"""Redistribution: known paths; bytes by formula; paths by enumeration."""

from __future__ import annotations

import itertools
import math
import random
from functools import lru_cache

import pytest
from torch.distributed.tensor import Partial, Shard

from fxshard.cost import time_price
from fxshard.errors import LayoutError
from fxshard.layout.layouts import Layout, all_layouts
from fxshard.layout.redistribution import Price, Step, bytes_price, sent_bytes, single_step, steps, walk
from fxshard.mesh.mesh import Mesh, parse_mesh
from fxshard.plans.plan_data import Redistribution
from fxshard.plans.sharding_plan import ShardingPlan
from tests.moved import pairs, run

L = Layout.parse


@lru_cache
def probes(axes: str, ndim: int) -> list[tuple[Layout, Layout]]:
    return random.Random(1).sample(list(itertools.product(all_layouts(ndim, parse_mesh(axes).shape), repeat=2)), 60)


@pytest.mark.parametrize("axes", ["a=2,b=3", "a=2,b=2,c=2"])
def test_steps_between_plain_layouts_change_the_innermost_axis_of_a_dim(axes: str) -> None:
    """Shards of a dim are nested in mesh order: an axis can start or stop sharding a dim only while no later axis shards it."""
    mesh = parse_mesh(axes)
    for source, target in probes(axes, 2):
        layout = source
        for before, step, after in walk(source, steps(source, target, (12, 12), 4, mesh)):
            assert before == layout
            layout = after
            if before.is_folded or after.is_folded:
                continue
            assert [a for a, (p, q) in enumerate(zip(before, after, strict=True)) if p != q] == [step.axis]
            assert (step.source, step.target) == (before[step.axis], after[step.axis])
            moved = {p.dim for p in (step.source, step.target) if isinstance(p, Shard)}
            assert not moved & {p.dim for p in before[step.axis + 1 :] if isinstance(p, Shard)}
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


def test_bytes_on_one_axis_are_those_of_the_shard_on_the_others() -> None:
    mesh, step = Mesh({"a": 2, "b": 4}), single_step(1, L("P")[0], L("R")[0])
    assert step is not None
    assert sent_bytes(step, L("S(0)P"), (16, 8), 4, mesh) == 2 * 3 / 4 * (16 * 8 * 4 / 2)
    assert sent_bytes(step, L("RP"), (16, 8), 4, mesh) == 2 * 3 / 4 * (16 * 8 * 4)


@pytest.mark.parametrize(("axes", "shape"), [("a=4", (8, 4)), ("a=4", (6, 3)), ("a=2,b=3", (7, 5)), ("a=2,b=2", (3, 2, 5))])
def test_predicted_bytes_are_those_of_the_buffers_issued(axes: str, shape: tuple[int, ...]) -> None:
    """The bytes follow from the ring formulas and the buffer that a rank passes in; the plan knows the shape of each buffer."""
    mesh = parse_mesh(axes)
    for source, targets in pairs(all_layouts(len(shape), mesh.shape), 120).items():
        entries = [Redistribution("x", shape, 8, source, t, steps(source, t, shape, 8, mesh), ()) for t in targets]
        planned = ShardingPlan(mesh, False, "", (), tuple(entries)).collectives
        issued = run(source, [entry.steps for entry in entries], shape, mesh)
        assert [(c.kind, c.axis) for c in planned] == [(c.kind, c.axis) for c in issued]
        for plan, real in zip(planned, issued, strict=True):
            n, held = mesh.shape[mesh.axis(real.axis)], math.prod(real.shape) * 8
            factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1}.get(real.kind, (n - 1) / n)
            assert plan.bytes == math.ceil(factor * held - 1e-9)
            assert math.prod(plan.buffer) * 8 == held


def test_placements_between_which_there_is_a_single_step() -> None:
    """There is a step between any two placements, except from a shard or a pending value to another pending value."""
    placements = [*L("RS(0)S(1)P"), Partial("max")]
    without = {(p, q) for p, q in itertools.product(placements, repeat=2) if p != q and single_step(0, p, q) is None}
    assert without == {(p, q) for p in placements if not p.is_replicate() for q in placements if isinstance(q, Partial) and p != q}
    assert Step("all_to_all", 0, *L("S(0)S(1)")).describe(Mesh({"tp": 2})) == "all_to_all(tp: S(0)->S(1))"


def test_pending_reductions_whose_order_matters_are_refused() -> None:
    """A maximum of sums is not a sum of maxima. Sums and means may be mixed; other kinds are reduced to the whole value in between."""
    mesh = Mesh({"a": 2, "b": 2})
    assert [s.kind for s in steps(L("PP(avg)"), L("RR"), (1,), 4, mesh)] == ["all_reduce", "all_reduce"]
    assert [s.kind for s in steps(L("P(max)R"), L("PR"), (4, 4), 4, mesh)] == ["all_reduce", "to_partial"]
    for source, target in (("PP(max)", "RR"), ("RR", "P(min)P(max)"), ("S(0)P", "P(product)P")):
        with pytest.raises(LayoutError, match="whose order would matter"):
            steps(L(source), L(target), (4, 4), 4, mesh)


@pytest.mark.parametrize("shape", [(64, 48), (63, 5)])
def test_a_sum_over_two_axes_is_scattered_on_the_fast_one(shape: tuple[int, ...]) -> None:
    """Fewer bytes cross the slow links: the all-reduce there is of the shards that the inner axis has scattered."""
    mesh = Mesh({"node": 4, "gpu": 8}, "h100")
    for price in (bytes_price, time_price(mesh)):
        found = steps(L("PP"), L("RR"), (shape[0] * 2048, shape[1]), 4, mesh, price)
        assert [s.kind for s in found] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert [s.axis for s in found] == [1, 0, 1]
