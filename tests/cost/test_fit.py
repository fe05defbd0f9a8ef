"""Hardware fitted to times generated from known rates: the fit recovers the rates, and predicts the other times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from statistics import mean

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fxshard.cost.collectives import collective_time
from fxshard.cost.fit import (
    CollectiveTime,
    OpTime,
    PredictionErrors,
    collective_errors,
    drop_collective_curves,
    fit_device,
    fit_links,
    isotonic,
    lower_envelope,
    noisy_collectives,
    op_errors,
    rounded,
)
from fxshard.errors import RunError
from fxshard.graph.call import Call, Operand, TensorMeta
from fxshard.layout.redistribution import COLLECTIVES
from fxshard.mesh.hardware import HARDWARE, Curve, Hardware, Link
from fxshard.mesh.mesh import Mesh

INSIDE, BETWEEN, LAUNCH = Link(4e9, 20.0), Link(5e8, 70.0), 5.0
NODES_OF_FOUR = Hardware("unknown", {4: 1e12}, 1e11, LAUNCH, 4, Link(1e9, 1.0), Link(1e9, 1.0))
SIZES = [2**i for i in range(10, 27)]


def ring(kind: str, n: int, link: Link, sent: int) -> float:
    """Microseconds of a ring by hops and bytes (Thakur et al.)."""
    return LAUNCH + (2 * (n - 1) if kind == "all_reduce" else n - 1) * link.latency + sent / link.bandwidth * 1e6


def tree(n: int, link: Link, sent: int) -> float:
    """Microseconds of an all-reduce up and down a tree of depth log2 n, which sends 2 N bytes."""
    return LAUNCH + 2 * math.log2(n) * link.latency + 2 * (sent * n / (2 * (n - 1))) / link.bandwidth * 1e6


def generated(axis: int, n: int, link: Link, trees: bool) -> list[CollectiveTime]:
    out = []
    for kind in COLLECTIVES:
        for i, sent in enumerate(SIZES):
            times = [ring(kind, n, link, sent)] + [tree(n, link, sent)] * (trees and kind == "all_reduce")
            out.append(CollectiveTime(kind, axis, sent, min(times), fitted=i % 2 == 0))
    return out


def close(found: Link | None, link: Link) -> bool:
    return (
        found is not None
        and found.bandwidth == pytest.approx(link.bandwidth, rel=1e-3)
        and found.latency == pytest.approx(link.latency, rel=1e-3)
    )


def test_links_are_recovered_and_predict_the_other_sizes() -> None:
    """One axis is inside a node, one between nodes. The start values are far off; the sizes not used for the fit have no error."""
    mesh = Mesh({"dp": 8, "tp": 4}, NODES_OF_FOUR)
    times = [*generated(0, 8, BETWEEN, True), *generated(1, 4, INSIDE, False)]
    found = fit_links(mesh, times)
    assert close(found.inside, INSIDE) and close(found.between, BETWEEN)
    for hardware in (found, drop_collective_curves(found), rounded(found)):
        errors = collective_errors(hardware, mesh, times)
        assert [e.what for e in errors] == [f"{kind} on {axis}" for axis in ("dp", "tp") for kind in COLLECTIVES]
        assert all(len(e.errors) == len(SIZES) // 2 for e in errors)
        bent = 0.05 if hardware.measured.collectives else 1e-3  # curves interpolate across the kink between tree and ring
        assert max(abs(e.worst[0]) for e in errors) < bent


def test_links_alone_predict_groups_that_were_not_measured() -> None:
    """Measured on 4 ranks, predicted for 3 and 8."""
    found = fit_links(Mesh({"tp": 4}, NODES_OF_FOUR), generated(0, 4, INSIDE, False))
    assert close(found.inside, INSIDE) and found.between is None
    wide = Hardware("wide", found.flops, 1e11, LAUNCH, 8, found.inside, None, {}, found.measured)
    for n in (3, 8):
        times = [CollectiveTime(kind, 0, sent, ring(kind, n, INSIDE, sent), False) for kind in COLLECTIVES for sent in SIZES]
        assert all(abs(e.worst[0]) < 1e-3 for e in collective_errors(wide, Mesh({"tp": n}, wide), times))


def test_a_kind_that_is_slower_than_the_others() -> None:
    """All-gathers take twice as long. The fit gives them half the efficiency and leaves the other kinds as they are."""
    mesh = Mesh({"tp": 4}, Hardware("unknown", {4: 1e12}, 1e11, 0.0, 4, Link(1e9, 1.0), None))
    times = [CollectiveTime(t.kind, 0, t.sent, t.time - LAUNCH, t.fitted) for t in generated(0, 4, INSIDE, False)]
    times = [CollectiveTime(t.kind, 0, t.sent, t.time * (2 if t.kind == "all_gather" else 1), t.fitted) for t in times]
    found = drop_collective_curves(fit_links(mesh, times))
    assert all(abs(e.worst[0]) < 1e-3 for e in collective_errors(found, mesh, times))
    reached = found.measured.efficiency
    assert reached["all_gather"].latency == pytest.approx(2 * reached["all_reduce"].latency, rel=1e-3)
    assert reached["all_gather"].bandwidth == pytest.approx(reached["all_reduce"].bandwidth / 2, rel=1e-3)


def op(name: str, shapes: list[tuple[int, ...]], result: tuple[int, ...], time: float, fitted: bool, *rest: object) -> OpTime:
    metas = tuple(TensorMeta(s, torch.float32) for s in shapes)
    call = Call(name, (*map(Operand, range(len(shapes))), *rest), (), metas, (TensorMeta(result, torch.float32),))
    return OpTime(name, call, time, fitted)


def test_rates_are_recovered() -> None:
    """Recovers 1 TFLOP/s, 100 GB/s and 3 us per launch from square products and copies, and predicts additions."""
    ops = []
    for i, n in enumerate((64, 96, 128, 192, 256, 384, 512)):
        ops.append(op("fxshard.einsum.default", [(n, n), (n, n)], (n, n), 3 + 2 * n**3 / 1e12 * 1e6, i % 2 == 0, "mk,kn->mn"))
    for i, n in enumerate((2**12, 2**13, 2**14, 2**16, 2**20)):
        ops.append(op("aten.clone.default", [(n,)], (n,), 3 + 8 * n / 1e11 * 1e6, i % 2 == 0))
        ops.append(op("aten.add.Tensor", [(n,), (n,)], (n,), 3 + 12 * n / 1e11 * 1e6, False))
    found = fit_device(HARDWARE["cpu"], ops, 3.0)
    assert found.flops == pytest.approx({4: 1e12}) and found.memory_bandwidth == pytest.approx(1e11) and found.launch == 3
    errors = op_errors(found, ops)
    assert {e.what: len(e.errors) for e in errors} == {"fxshard.einsum.default": 3, "aten.clone.default": 2, "aten.add.Tensor": 5}
    for one in errors:
        # Roofline: the bytes of the smallest products take longer than their FLOPs.
        assert abs(one.worst[0]) < (1e-6 if "einsum" not in one.what else 0.2)


def test_median_and_worst_error() -> None:
    one = PredictionErrors("copy", (0.1, -0.4, 0.2), (10.0, 20.0, 30.0))
    assert one.median == 0.2 and one.worst == (-0.4, 20.0)


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=12))
def test_the_lower_envelope_is_the_highest_increasing_curve_below_the_times(times: list[float]) -> None:
    """At each size it is the least time of this and all larger sizes."""
    if min(times) == times[-1]:
        return
    found = lower_envelope(reversed(list(enumerate(times))))
    assert found.points == tuple((i, min(times[i:])) for i in range(len(times)))


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_no_increasing_curve_is_nearer_than_isotonic_regression(times: list[int]) -> None:
    """Against every increasing curve through multiples of 1/2. If the fit is constant, no prefix has a mean below that of all times."""

    def distance(curve: Iterable[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(curve, times, strict=True))

    try:
        found = [time for _, time in isotonic(enumerate(times)).points]
    except RunError:
        assert all(mean(times[:k]) >= mean(times) for k in range(1, len(times)))
        return
    assert found == sorted(found)
    rivals = itertools.combinations_with_replacement([n / 2 for n in range(2, 13)], len(times))
    assert distance(found) <= min(map(distance, rivals)) + 1e-9


def test_one_short_measurement_does_not_drag_the_others_down() -> None:
    """The time of the largest size is noise. Isotonic regression averages it with its neighbours; the lower envelope would be 1."""
    points = [(1, 100.0), (2, 110.0), (4, 130.0), (8, 170.0), (16, 1.0)]
    assert [time for _, time in isotonic(points).points] == pytest.approx([100.0] + [(110 + 130 + 170 + 1) / 4] * 4)


@pytest.mark.parametrize("fit", [lower_envelope, isotonic])
def test_measurements_that_do_not_grow_are_refused(fit: Callable[[list[tuple[int, float]]], Curve]) -> None:
    with pytest.raises(RunError, match="3 measurements of sizes from 1 to 4 do not take longer as the size grows"):
        fit([(1, 5.0), (2, 4.0), (4, 3.0)])


def test_a_collective_that_takes_no_longer_for_more_bytes_has_no_curve() -> None:
    """Noisy all-reduces are named, and predicted from the links, which the other collectives determine."""
    mesh = Mesh({"dp": 2}, NODES_OF_FOUR)
    times = [
        CollectiveTime(kind, 0, sent, ring(kind, 2, INSIDE, sent), True) for kind in ("all_gather", "reduce_scatter") for sent in SIZES
    ]
    level = [CollectiveTime("all_reduce", 0, sent, 900.0 - index, True) for index, sent in enumerate(SIZES)]
    found = fit_links(mesh, [*times, *level])
    assert noisy_collectives(mesh, [*times, *level]) == ["all_reduce on dp"] and not noisy_collectives(mesh, times)
    assert set(found.measured.collectives) == {("all_gather", 2, 1), ("reduce_scatter", 2, 1)}
    assert (found.inside.bandwidth, found.inside.latency) == pytest.approx((INSIDE.bandwidth, INSIDE.latency), rel=1e-3)
    again = Mesh({"any": 2}, found)
    for sent in SIZES:
        assert collective_time("all_reduce", 0, sent, again) == pytest.approx(ring("all_reduce", 2, INSIDE, sent), rel=1e-2)
    with pytest.raises(RunError, match="no collective takes longer with more bytes"):
        fit_links(mesh, level)
