"""Costs against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxshard.cost import collective_time, compute_time, time_price
from fxshard.errors import OptionError
from fxshard.graph.call import Call, Operand, TensorMeta, call_of
from fxshard.layout.layouts import Layout
from fxshard.layout.redistribution import single_step, step_price
from fxshard.mesh.hardware import HARDWARE, Curve, Hardware, Link, Measured
from fxshard.mesh.mesh import Mesh
from fxshard.passes.trace.trace import trace
from fxshard.plans.plan_data import OpSpec

L = Layout.parse
H = Hardware("round", {2: 2e12, 4: 1e12}, 1e11, 5.0, 4, Link(1e10, 1.0), Link(1e9, 10.0))
"""A teraflop, 100 GB/s of memory; 10 GB/s and 1 us inside nodes of four, 1 GB/s and 10 us between them."""


def call(op: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], *rest: object, dtype: torch.dtype = torch.float32) -> Call:
    operands = tuple(TensorMeta(s, dtype) for s in shapes)
    return Call(op, (*(Operand(i) for i in range(len(shapes))), *rest), (), operands, (TensorMeta(out, dtype),))


def time_of(one: Call, mesh: Mesh, inputs: str, output: str) -> float:
    return compute_time(one, OpSpec(tuple(map(L, inputs.split())), (L(output),)), mesh)


def test_a_product_bound_by_compute() -> None:
    """2 x 1000^3 FLOP at 1e12 a second are 2 ms. Sharded over two ranks, by rows or by the contracted dim, half of that."""
    mm = call("fxshard.einsum.default", [(1000, 1000), (1000, 1000)], (1000, 1000), "mk,kn->mn")
    mesh = Mesh({"a": 2}, H)
    assert time_of(mm, mesh, "R R", "R") == pytest.approx(2000)
    assert time_of(mm, mesh, "S(0) R", "S(0)") == time_of(mm, mesh, "S(1) S(0)", "P") == pytest.approx(1000)


def test_a_product_bound_by_memory() -> None:
    """A vector times a matrix: 4 x (1000 + 1000 x 1000 + 1000) bytes at 1e11 a second, against 2 us of arithmetic."""
    mv = call("fxshard.einsum.default", [(1, 1000), (1000, 1000)], (1, 1000), "mk,kn->mn")
    assert time_of(mv, Mesh({"a": 2}, H), "R R", "R") == pytest.approx(4 * 1_002_000 / 1e11 * 1e6)


def test_a_lookup_reads_the_rows_that_it_returns() -> None:
    """100 rows of 64 floats are read and written, and 100 indices, of 4 bytes here, are read; of a table of 10 rows, no more than that."""
    mesh = Mesh({"a": 2}, H)
    moved = {1_000_000: 4 * (100 * 64 + 100 + 100 * 64), 10: 4 * (10 * 64 + 100 + 100 * 64)}
    for rows, size in moved.items():
        found = call("aten.embedding.default", [(rows, 64), (100,)], (100, 64))
        assert time_of(found, mesh, "R R", "R") == pytest.approx(size / 1e11 * 1e6)
    bags = call("aten._embedding_bag.default", [(1_000_000, 64), (100,), (5,)], (5, 64))  # sums of 100 rows
    assert time_of(bags, mesh, "R R R", "R") == pytest.approx(4 * (100 * 64 + 100 + 5 + 5 * 64) / 1e11 * 1e6)


def test_rates_by_element_size() -> None:
    """Half precision runs at its own rate; float64 has no rate here and runs at that of four bytes."""
    mesh = Mesh({"a": 2}, H)
    half = call("fxshard.einsum.default", [(1000, 1000)] * 2, (1000, 1000), "mk,kn->mn", dtype=torch.bfloat16)
    double = call("fxshard.einsum.default", [(1000, 1000)] * 2, (1000, 1000), "mk,kn->mn", dtype=torch.float64)
    assert time_of(half, mesh, "R R", "R") == pytest.approx(1000)
    assert time_of(double, mesh, "R R", "R") == pytest.approx(2000)


def test_elements_without_a_rate_of_their_own() -> None:
    """One byte has the rate of two, a complex product counts as four real ones; without a usable rate there is an error."""
    mesh, ms = Mesh({"a": 2}, H), 1000.0

    def product(dtype: torch.dtype, on: Mesh = mesh) -> float:
        return time_of(call("fxshard.einsum.default", [(1000, 1000)] * 2, (1000, 1000), "mk,kn->mn", dtype=dtype), on, "R R", "R")

    assert product(torch.float8_e4m3fn) == product(torch.float16) == pytest.approx(ms)
    assert product(torch.complex64) == pytest.approx(8 * ms)
    with pytest.raises(OptionError, match=r"'none' has no FLOP rate for elements of 2 bytes"):
        product(torch.float16, Mesh({"a": 2}, replace(H, name="none", flops={1: 1e12})))


def test_measured_products_and_copies_replace_rates() -> None:
    """2 x 100^3 FLOP: bfloat16 has the measured time, float32 that of the rate, or of its memory traffic by the copy curve if longer."""
    curve, copy = Curve(((10**6, 30.0), (3 * 10**6, 70.0))), Curve(((10**4, 1.0), (10**6, 10.0)))
    mesh = Mesh({"a": 2}, replace(H, measured=Measured({"bfloat16": curve}, copy)))
    shapes = [(100, 100)] * 2
    assert time_of(call("fxshard.einsum.default", shapes, (100, 100), "mk,kn->mn", dtype=torch.bfloat16), mesh, "R R", "R") == 50
    single = time_of(call("fxshard.einsum.default", shapes, (100, 100), "mk,kn->mn"), mesh, "R R", "R")
    assert single == pytest.approx(max(2.0, copy(3 * 40_000)))
    add = call("aten.add.Tensor", shapes, (100, 100), dtype=torch.bfloat16)
    assert time_of(add, mesh, "R R", "R") == pytest.approx(copy(3 * 20_000))
    step = single_step(0, L("R")[0], L("S(0)")[0])
    assert step is not None and time_price(mesh)(step, 0, 10**6) == pytest.approx(0.1 + 10)


def test_pointwise_operators_cost_their_reads_and_writes() -> None:
    """Three tensors of a million floats; an uneven shard counts at the size of the largest."""
    add = call("aten.add.Tensor", [(1000, 1000)] * 2, (1000, 1000))
    assert time_of(add, Mesh({"a": 2}, H), "R R", "R") == pytest.approx(12e6 / 1e11 * 1e6)
    assert time_of(add, Mesh({"a": 3}, H), "S(0) S(0)", "S(0)") == pytest.approx(12 * 334 * 1000 / 1e11 * 1e6)
    assert time_of(add, Mesh({"a": 2, "b": 2}, H), "S(0)S(1) S(0)S(1)", "S(0)S(1)") == pytest.approx(3e6 / 1e11 * 1e6)


def test_views_are_free_and_convolutions_count_their_kernels() -> None:
    mesh = Mesh({"a": 2}, H)
    assert time_of(call("aten.view.default", [(10, 10)], (100,), (100,)), mesh, "R", "R") == 0
    assert time_of(call("aten.slice.Tensor", [(1000, 1000)], (500, 1000), 0, 0, 500), mesh, "R", "R") == 0
    assert time_of(call("aten.slice_scatter.default", [(1000, 1000), (500, 1000)], (1000, 1000)), mesh, "R R", "R") == pytest.approx(100)
    conv = call("aten.convolution.default", [(8, 64, 32, 32), (128, 64, 3, 3)], (8, 128, 32, 32))
    assert time_of(conv, mesh, "R R", "R") == pytest.approx(2 * 8 * 128 * 32 * 32 * 64 * 9 / 1e12 * 1e6)
    assert time_of(conv, mesh, "S(0) R", "S(0)") == pytest.approx(8 * 128 * 32 * 32 * 64 * 9 / 1e12 * 1e6)


def test_attention_counts_two_products_and_half_when_causal() -> None:
    shape = (2, 8, 512, 64)
    mesh, one = Mesh({"a": 2}, H), 2 * 2 * 8 * 512 * 512 * 64 / 1e12 * 1e6
    for causal, factor in ((False, 2), (True, 1)):
        sdpa = call("fxshard.sdpa.default", [shape] * 3, shape, None, causal, 0.0, None)
        assert sdpa.args[4] is causal
        assert time_of(sdpa, mesh, "R R R", "R") == pytest.approx(factor * one)


def test_causal_attention_with_sharded_queries_costs_what_the_last_shard_sees() -> None:
    """Of 2 shards, the last sees all keys of the first, and half of its own: 3/4 of the keys."""
    shape, mesh = (2, 8, 512, 64), Mesh({"a": 2}, H)
    whole = call("fxshard.sdpa.default", [shape] * 3, shape, None, False, 0.0, None)
    causal = call("fxshard.sdpa.default", [shape] * 3, shape, None, True, 0.0, None)
    assert time_of(causal, mesh, "S(2) R R", "S(2)") == pytest.approx(time_of(whole, mesh, "S(2) R R", "S(2)") * 3 / 4)
    assert time_of(causal, mesh, "S(1) S(1) S(1)", "S(1)") == time_of(whole, mesh, "S(1) S(1) S(1)", "S(1)") / 2


def test_batch_norm_in_parts_costs_what_it_reads_and_writes_once() -> None:
    """As one operator would: x is read and written once, and some vectors."""
    x, mesh = (64, 128, 32, 32), Mesh({"a": 2}, H)
    total = time_of(call("fxshard.channel_sum.default", [x], (128,)), mesh, "R", "R")
    spread = time_of(call("fxshard.channel_spread.default", [x, (128,)], (128,), 65536), mesh, "R R", "R")
    applied = time_of(call("fxshard.normalise.default", [x, *[(128,)] * 4], x), mesh, "R R R R R", "R")
    assert total + spread + applied == pytest.approx(4 * (2 * 64 * 128 * 32 * 32 + 4 * 128) / 1e11 * 1e6)


WANTED = [((True, True, True), 3), ((False, True, True), 2), ((False, False, True), 1), ((True, False, False), 3)]


@pytest.mark.parametrize(("wanted", "tensors"), WANTED)
def test_gradients_of_a_norm_read_its_tensors_once(wanted: tuple[bool, bool, bool], tensors: int) -> None:
    """For any of (x, weight, bias): it reads the gradient and x as needed, and writes the result."""
    mesh, norm = Mesh({"a": 2}, H), torch.nn.LayerNorm(64)
    norm.weight.requires_grad_(wanted[1])
    norm.bias.requires_grad_(wanted[2])
    graph = trace(norm, (torch.randn(1000, 64, requires_grad=wanted[0]),))
    calls = [call_of(n) for n in graph.nodes if "row_norm_" in str(n.target)]
    total = sum(compute_time(c, OpSpec((L("R"),) * len(c.operands), (L("R"),)), mesh) for c in calls)
    assert total == pytest.approx(4 * tensors * 1000 * 64 / 1e11 * 1e6, rel=0.1), "vectors cost almost nothing"


def test_backwards_count_all_their_products() -> None:
    """Attention has five products of 2 b h s t d: scores again, and gradients of v, scores, q, k. Convolution has two, as its forward."""
    mesh = Mesh({"a": 2}, H)
    shape, statistics = (2, 8, 512, 64), (2, 8, 512)
    for causal, factor in ((False, 5), (True, 2.5)):
        sdpa = call("fxshard.sdpa_backward.default", [shape] * 5 + [statistics], shape, None, causal, None, False)
        assert sdpa.args[7] is causal
        assert time_of(sdpa, mesh, "R R R R R R", "R") == pytest.approx(factor * 2 * (2 * 8 * 512 * 512 * 64) / 1e12 * 1e6)
    conv = call("aten.convolution_backward.default", [(8, 128, 32, 32), (8, 64, 32, 32), (128, 64, 3, 3)], (8, 64, 32, 32))
    assert time_of(conv, mesh, "R R R", "R") == pytest.approx(2 * 2 * (8 * 128 * 32 * 32) * (64 * 9) / 1e12 * 1e6)
    assert time_of(conv, mesh, "S(0) S(0) R", "S(0)") == pytest.approx(2 * (8 * 128 * 32 * 32) * (64 * 9) / 1e12 * 1e6)


def test_a_grouped_product_costs_as_much_as_a_plain_one() -> None:
    """1000 rows in 8 groups: 2 x 1000^3 FLOP, 2 ms, and as much for the gradient of the weights; half with half the groups."""
    mesh = Mesh({"a": 2}, H)
    rows = call("aten._grouped_mm.default", [(1000, 1000), (8, 1000, 1000), (8,)], (1000, 1000))
    grad = call("aten._grouped_mm.default", [(1000, 1000), (1000, 1000), (8,)], (8, 1000, 1000))
    assert time_of(rows, mesh, "R R R", "R") == time_of(grad, mesh, "R R R", "R") == pytest.approx(2000)
    assert time_of(rows, mesh, "R S(0) R", "P") == time_of(grad, mesh, "R R R", "S(0)") == pytest.approx(1000)


@pytest.mark.parametrize(("kind", "hops"), [("all_reduce", 6), ("all_gather", 3), ("reduce_scatter", 3), ("all_to_all", 3)])
def test_alpha_beta(kind: str, hops: int) -> None:
    """Launch, hops times latency, bytes over bandwidth: on four ranks inside a node, and across nodes."""
    assert collective_time(kind, 0, 1_000_000, Mesh({"a": 4}, H)) == pytest.approx(5 + hops * 1 + 100)
    assert collective_time(kind, 0, 1_000_000, Mesh({"a": 4, "b": 4}, H)) == pytest.approx(5 + hops * 10 + 1000)
    assert collective_time(kind, 1, 1_000_000, Mesh({"a": 2, "b": 4}, H)) == pytest.approx(5 + hops * 1 + 100)
    assert collective_time(kind, 0, 1_000_000, Mesh({"a": 1, "b": 4}, H)) == 0


def test_prices_of_steps() -> None:
    """An all-reduce of 4 MB over two ranks sends 4 MB. A step that sends nothing costs its writes and 0.1 us."""
    mesh = Mesh({"a": 2}, H)
    price, shape = time_price(mesh), (1000, 1000)
    steps = {p + q: single_step(0, L(p)[0], L(q)[0]) for p, q in [("P", "R"), ("R", "S(0)"), ("S(0)", "S(1)"), ("P", "S(0)"), ("R", "P")]}
    priced = {k: step_price(s, Layout([s.source]), shape, 4, mesh, price) for k, s in steps.items() if s is not None}
    assert priced["PR"] == pytest.approx(5 + 2 + 400)
    assert priced["PS(0)"] == pytest.approx(5 + 1 + 200)
    assert priced["S(0)S(1)"] == pytest.approx(5 + 1 + 100 + 40)
    assert priced["RS(0)"] == pytest.approx(0.1 + 20)
    assert priced["RP"] == pytest.approx(0.1 + 40)


def test_presets() -> None:
    """A product of Llama-sized bfloat16 matrices on an H100 runs at 40 to 80 % of the peak; presets differ by less than a factor of 60."""
    mm = call("fxshard.einsum.default", [(4096, 4096)] * 2, (4096, 4096), "mk,kn->mn", dtype=torch.bfloat16)
    whole, peak = time_of(mm, Mesh({"tp": 8}, "h100"), "R R", "R"), 2 * 4096**3 / 989e12 * 1e6
    assert peak / 0.8 < whole < peak / 0.4
    assert all(time_of(mm, Mesh({"tp": 8}, h), "S(0) R", "S(0)") < whole * 60 for h in HARDWARE.values() if h.name != "cpu")
