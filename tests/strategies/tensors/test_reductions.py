"""Reductions over a sharded dim leave a pending reduction, or need the whole dim."""

import pytest
import torch

from tests.strategies.samples import positive, real, whole, yes_no
from tests.strategies.shards import check, check_mesh


@pytest.mark.parametrize("dims", [[0], [1], [0, 2], [-1], None, []])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sum(dims: list[int] | None, keepdim: bool) -> None:
    specs = check("aten.sum.dim_IntList", real(3, 5, 4), dims, keepdim)
    reduced = {d % 3 for d in dims} if dims else {0, 1, 2}
    for d in range(3):
        kept = d if keepdim else d - sum(r < d for r in reduced)
        assert f"S({d}) -> {'P' if d in reduced else f'S({kept})'}" in specs
    assert "P -> P" in specs


def test_sum_of_everything() -> None:
    assert "S(0) -> P" in check("aten.sum.default", real(5, 3))
    assert "S(0) -> P" in check("aten.sum.default", whole(9, 5))
    assert "S(0) -> P" in check("aten.sum.default", yes_no(5))


@pytest.mark.parametrize(("op", "reduce"), [("amax", "max"), ("amin", "min")])
def test_extremes(op: str, reduce: str) -> None:
    specs = check(f"aten.{op}.default", real(5, 3), [0], True)
    assert {f"S(0) -> P({reduce})", "S(1) -> S(1)", f"P({reduce}) -> P({reduce})"} <= specs
    assert "P -> P" not in specs
    assert f"S(0) -> P({reduce})" in check(f"aten.{op[1:]}.default", real(5, 3))


def test_any_and_all_are_extremes_of_booleans() -> None:
    assert "S(0) -> P(max)" in check("aten.any.dim", yes_no(5, 3), 0)
    assert "S(0) -> P(min)" in check("aten.all.dim", yes_no(5, 3), 0)
    assert "S(0) -> P(max)" in check("aten.any.default", yes_no(5, 3))
    assert "S(1) -> P(min)" in check("aten.all.default", yes_no(5, 3))
    assert "P(max) -> P(max)" in check("aten.any.dim", yes_no(5, 3), 0) - check("aten.any.dim", real(5, 3), 0)
    assert "P(min) -> P(min)" in check("aten.all.default", yes_no(5, 3)) - check("aten.all.default", real(5, 3))


def test_prod() -> None:
    assert {"S(0) -> P(product)", "S(1) -> S(0)", "P(product) -> P(product)"} <= check("aten.prod.dim_int", real(5, 3), 0)
    assert "S(0) -> P(product)" in check("aten.prod.default", real(5, 3))


def test_a_mean_does_not_shard_its_dims() -> None:
    specs = check("aten.mean.dim", real(5, 3), [0], True)
    assert "S(1) -> S(1)" in specs
    assert not any(s.startswith("S(0)") for s in specs)
    assert "P -> P" in check("aten.mean.default", real(5, 3))


@pytest.mark.parametrize(
    ("op", "args"),
    [("max.dim", (0,)), ("min.dim", (0, True)), ("argmax.default", (0,)), ("argmin.default", (0, True)), ("logsumexp.default", ([0],))],
)
def test_reductions_that_do_not_shard_their_dim(op: str, args: tuple[object, ...]) -> None:
    specs = {s for s in check(f"aten.{op}", real(5, 3), *args) if "S" in s}
    assert len(specs) == 1
    assert next(iter(specs)).startswith("S(1)")


def test_argmax_of_everything_is_replicated() -> None:
    assert check("aten.argmax.default", real(5, 3)) == {"R -> R"}


@pytest.mark.parametrize("op", ["var", "std", "var_mean", "std_mean"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_variances(op: str, keepdim: bool) -> None:
    specs = {s for s in check(f"aten.{op}.correction", real(5, 4), [1], correction=0, keepdim=keepdim) if "S" in s}
    assert specs == {"S(0) -> S(0), S(0)" if "mean" in op else "S(0) -> S(0)"}


@pytest.mark.parametrize("op", ["cumsum", "cumprod", "logcumsumexp", "cummax", "sort", "argsort"])
def test_scans_and_sorts_do_not_shard_their_dim(op: str) -> None:
    specs = check(f"aten.{op}.default", positive(5, 3), 0)
    assert any(s.startswith("S(1)") for s in specs)
    assert not any(s.startswith("S(0)") for s in specs)


def test_sort_and_topk() -> None:
    assert "S(1) -> S(1), S(1)" in check("aten.sort.stable", real(5, 4), stable=True, dim=0)
    assert "S(0) -> S(0), S(0)" in check("aten.topk.default", real(5, 4), 2, -1)
    check("aten.linalg_vector_norm.default", real(5, 3), 2, [1])


def test_fourier_transforms_are_linear_along_their_dims() -> None:
    assert {"S(0) -> S(0)", "P -> P"} <= check("aten._fft_r2c.default", real(5, 6), [1], 0, True)
    check("aten._fft_c2c.default", torch.complex(real(5, 6), real(5, 6)), [0], 0, True)
    check("aten._fft_c2r.default", torch.complex(real(5, 4), real(5, 4)), [1], 0, 6)
    found = [{str(spec) for spec in check_mesh("aten._fft_r2c.default", (real(rows, 6), [1], 0, True), mesh=(4,))} for rows in (4, 3)]
    assert "S(0) -> S(0)" in found[0] and "S(0) -> S(0)" not in found[1]  # MKL takes no empty batch
    check("aten.median.default", real(5))
    check("aten.norm.ScalarOpt_dim", real(5, 3), 2, [1], True)


def test_no_tensor_has_two_kinds_of_pending_reductions() -> None:
    for spec in check_mesh("aten.amax.default", (real(5, 3), [0]), mesh=(2, 2)):
        assert str(spec.outputs[0]).count("P") <= str(spec.outputs[0]).count("P(max)")


def test_histogram() -> None:
    assert "S(0) -> P" in check("aten.histc.default", real(7), 4, -1, 1)
    assert check("aten.histc.default", real(7), 4) == {"R -> R"}
