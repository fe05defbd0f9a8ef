"""Results of another dtype than their operands: which pending reductions commute with the conversion, by operator and in a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.pipeline import Request, lower_plan, plan_graph
from fxshard.passes.trace.trace import trace
from fxshard.runtime.simulate.simulate import simulate_program
from fxshard.runtime.simulate.values import program_values
from fxshard.strategies.engine import engine
from fxshard.strategies.engine.conversion import commutes_with_conversion, has_reduction
from fxshard.testing import assert_equal_to_one_device, one_device
from fxshard.testing.random_plan import random_graph_plan
from tests.strategies.samples import positive, real, whole, yes_no
from tests.strategies.shards import check, spread

DTYPES = (torch.float64, torch.float32, torch.int64, torch.int8, torch.uint8, torch.bool)
PAIRS = list(itertools.product(DTYPES, DTYPES))
IDS = [f"{a}-{b}".replace("torch.", "") for a, b in PAIRS]


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Numbers of both signs, if the dtype has them."""
    if dtype == torch.bool:
        return yes_no(*shape)
    if dtype.is_floating_point:
        return (real(*shape) * 3).to(dtype)
    return (whole(9, *shape) - 4).to(dtype)


@pytest.mark.parametrize(
    ("op", "source", "target", "kept"),
    [
        ("sum", torch.float32, torch.float64, True),
        ("sum", torch.float64, torch.bfloat16, True),
        ("avg", torch.float32, torch.complex64, True),
        ("sum", torch.complex64, torch.float32, True),
        ("product", torch.complex64, torch.float32, False),
        ("sum", torch.float32, torch.int64, False),
        ("sum", torch.int64, torch.int32, True),
        ("product", torch.int64, torch.uint8, True),
        ("sum", torch.int8, torch.int64, False),
        ("sum", torch.int64, torch.float64, False),
        ("sum", torch.float32, torch.bool, False),
        ("max", torch.int8, torch.int64, True),
        ("max", torch.int64, torch.int8, False),
        ("max", torch.int8, torch.uint8, False),
        ("min", torch.uint8, torch.int16, True),
        ("max", torch.int64, torch.float16, True),
        ("max", torch.float32, torch.int64, False),
        ("max", torch.bool, torch.float32, True),
        ("max", torch.int64, torch.bool, False),
        ("max", torch.bool, torch.bool, True),
        ("sum", torch.bool, torch.bool, False),
        ("sum", torch.float32, torch.float8_e4m3fn, False),
    ],
)
def test_conversions(op: str, source: torch.dtype, target: torch.dtype, kept: bool) -> None:
    assert commutes_with_conversion(op, source, target) == kept


def test_which_reductions_a_dtype_has() -> None:
    assert [op for op in ("sum", "avg", "max", "min", "product") if has_reduction(op, torch.bool)] == ["max", "min"]
    assert not has_reduction("avg", torch.int64)
    assert not has_reduction("max", torch.complex64)
    assert not has_reduction("product", torch.complex64)  # c10d has none
    assert not any(has_reduction(op, torch.float8_e5m2) for op in ("sum", "avg", "max", "min", "product"))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=IDS)
def test_casts(source: torch.dtype, target: torch.dtype) -> None:
    specs = check("aten._to_copy.default", sample(source, 5, 3), dtype=target)
    for op, pending in [("sum", "P"), ("avg", "P(avg)"), ("max", "P(max)"), ("min", "P(min)"), ("product", "P(product)")]:
        assert (f"{pending} -> {pending}" in specs) == commutes_with_conversion(op, source, target)


@pytest.mark.parametrize(
    ("op", "args", "dtype"),
    [
        ("sum.default", (sample(torch.float64, 5),), torch.int64),
        ("cumsum.default", (sample(torch.int8, 5, 3), 0), torch.int64),
        ("prod.default", (positive(5) + 1,), torch.int64),
        ("_to_copy.default", (sample(torch.int64, 5),), torch.float64),
        ("_to_copy.default", (sample(torch.int64, 5),), torch.int8),
        ("_to_copy.default", (real(5).round(),), torch.bool),
    ],
)
def test_the_oracle_finds_reductions_that_a_conversion_breaks(monkeypatch: Any, op: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    check(f"aten.{op}", *args, dtype=dtype)
    monkeypatch.setattr(engine, "commutes_with_conversion", lambda op, source, target: True)
    engine._cached.cache_clear()
    try:
        with pytest.raises(AssertionError, match="P"):
            check(f"aten.{op}", *args, dtype=dtype)
    finally:
        engine._cached.cache_clear()


@pytest.mark.parametrize("op", ["sum", "product", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_integers_are_split_into_pending_parts_on_all_ranks(op: str, dtype: torch.dtype) -> None:
    x = sample(dtype, 40)
    parts = spread(x, op, 3)
    merged = {"sum": sum, "product": math.prod}.get(op, lambda p: torch.stack(p).amax(0) if op == "max" else torch.stack(p).amin(0))
    assert torch.equal(merged(parts), x)
    assert not any(torch.equal(part, x) for part in parts)
    assert all(len(part.unique()) > 5 for part in parts)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=IDS)
def test_reductions_to_a_dtype(source: torch.dtype, target: torch.dtype) -> None:
    x = sample(source, 5, 3)
    for op, args in [("sum.default", ()), ("sum.dim_IntList", ([0],)), ("prod.default", ()), ("prod.dim_int", (0,))]:
        reduce, pending = ("sum", "P") if "sum" in op else ("product", "P(product)")
        specs = check(f"aten.{op}", x, *args, dtype=target)
        assert (f"{pending} -> {pending}" in specs) == commutes_with_conversion(reduce, source, target)
        assert (f"S(0) -> {pending}" in specs) == has_reduction(reduce, target)
    if target != torch.bool:
        assert ("P -> P" in check("aten.cumsum.default", x, 0, dtype=target)) == commutes_with_conversion("sum", source, target)
        assert not any("P" in spec for spec in check("aten.cumprod.default", x, 0, dtype=target))
    if target.is_floating_point:
        for op, args in [("mean.default", ()), ("mean.dim", ([0],))]:
            assert ("P -> P" in check(f"aten.{op}", x, *args, dtype=target)) == commutes_with_conversion("sum", source, target)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=IDS)
def test_operands_of_two_dtypes(source: torch.dtype, target: torch.dtype) -> None:
    x, y = sample(source, 5, 3), sample(target, 5, 3)
    for op in ("copy", "copy_"):
        specs = check(f"aten.{op}.default", y.clone(), x)
        assert ("P, P -> P" in specs) == commutes_with_conversion("sum", source, target)
        assert ("P(max), P(max) -> P(max)" in specs) == commutes_with_conversion("max", source, target)
    both = torch.promote_types(source, target)
    kept = all(commutes_with_conversion("sum", dtype, both) for dtype in (source, target))
    assert ("P, P -> P" in check("aten.add.Tensor", x, y)) == kept
    assert ("P, P -> P" in check("aten.cat.default", [x, y])) == kept
    assert ("R, P, P -> P" in check("aten.where.self", yes_no(5, 1), x, y)) == kept
    assert ("P, R -> P" in check("aten.mul.Tensor", x, y)) == commutes_with_conversion("sum", source, both)
    check("aten.maximum.default", x, y)
    check("aten.minimum.default", x, y)


@pytest.mark.parametrize("op", ["ceil", "floor", "round", "trunc", "sgn"])
def test_rounding_passes_extremes_only(op: str) -> None:
    extremes = {"P(max) -> P(max)", "P(min) -> P(min)"}
    assert check(f"aten.{op}.default", sample(torch.float64, 5)) == {"R -> R", "S(0) -> S(0)"} | extremes


def test_fractions_have_no_pending_reduction() -> None:
    assert check("aten.frac.default", sample(torch.float64, 5)) == {"R -> R", "S(0) -> S(0)"}


def test_averages_of_integers_are_rounded_and_pass_no_sum() -> None:
    for op, args in [("avg_pool2d", ([2, 2],)), ("upsample_nearest2d", ([8, 8],)), ("upsample_bilinear2d", ([8, 8], False))]:
        dtype = torch.int64 if op == "avg_pool2d" else torch.uint8
        assert "P -> P" not in check(f"aten.{op}.default", sample(dtype, 2, 3, 4, 4), *args)
        assert "P -> P" in check(f"aten.{op}.default", real(2, 3, 4, 4), *args)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8])
def test_quotients_of_integers_pass_no_sum(dtype: torch.dtype) -> None:
    x, y = sample(dtype, 5), (whole(3, 5) + 1).to(dtype)
    assert "P, R -> P" not in check("aten.div.Tensor", x, y)
    assert "P, R -> P" not in check("aten.floor_divide.default", x, y)
    assert "P, R -> P" not in check("aten.div.Tensor_mode", x, y, rounding_mode="trunc")
    assert "P -> P" not in check("aten.mul.Tensor", x, 0.5)


class Rounded(nn.Module):
    """A linear layer whose result is converted to integers."""

    total: torch.Tensor

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=False, dtype=torch.float64)
        self.register_buffer("total", torch.zeros(5, 6, dtype=torch.int64))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.linear(x) * 10)


WHOLE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "sum": lambda model, y: y.sum(0, dtype=torch.int64),
    "cumsum": lambda model, y: y.cumsum(1, dtype=torch.int32),
    "prod": lambda model, y: y.prod(1, dtype=torch.int64),
    "copy": lambda model, y: model.total.copy_(y),
    "wrapped": lambda model, y: y.to(torch.int8).sum(0, dtype=torch.int8).long(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_integers_from_a_sharded_contraction(name: str) -> None:
    torch.manual_seed(0)
    model, args, mesh = Rounded(WHOLE[name]), (real(5, 8),), fxshard.Mesh({"tp": 4})
    reference, graph = one_device(model, args, train=False), trace(model, args, train=False)
    weight = {"linear.weight": "S(1)"}
    plans = [plan_graph(graph, mesh, Request(train=False, pins=pins)) for pins in (weight, weight | {"einsum": "P"})]
    plans += [random_graph_plan(annotate(graph, mesh), seed) for seed in range(5)]
    for plan in plans:
        program = lower_plan(graph, plan)
        assert_equal_to_one_device(simulate_program(program, program_values(program, model, args)), reference)


def test_a_pending_sum_is_not_copied_into_an_integer_tensor() -> None:
    with pytest.raises(fxshard.FxshardError, match="copy"):
        fxshard.plan(Rounded(WHOLE["copy"]), (real(5, 8),), fxshard.Mesh({"tp": 4}), train=False, pins={"copy": "P"})
