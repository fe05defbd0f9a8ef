"""In-place, out= and foreach operators have the rules of their functional forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fxshard.strategies import has_rule
from fxshard.strategies.oracle import Sample, check_op
from tests.passes.tracing import Function, check_eager, targets
from tests.passes.tracing import real as leaf
from tests.strategies.samples import positive, real, whole
from tests.strategies.shards import KERNELS, check, check_mesh, find

X, Y = real(5, 3), positive(5, 3)


@pytest.fixture
def on_copies(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the operator on copies: it writes into its operands, and the checks need them again."""
    op = request.param
    real_one = find(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        return real_one(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **pytree.tree_map_only(torch.Tensor, torch.clone, kwargs))

    KERNELS[op] = run
    yield op
    del KERNELS[op]


@pytest.mark.parametrize("on_copies", ["aten.add_.Tensor", "aten.relu_.default", "aten.mul_.Tensor"], indirect=True)
def test_in_place(on_copies: str) -> None:
    given = (X,) if "relu" in on_copies else (X, Y)
    specs = check(on_copies, *given)
    assert {f"{', '.join(['S(0)'] * len(given))} -> S(0)", f"{', '.join(['R'] * len(given))} -> R"} <= specs
    assert ("P, P -> P" in specs) == ("add" in on_copies)
    assert ("R, P -> P" in specs) is False, "an operand written in place keeps its layout"


@pytest.mark.parametrize("on_copies", ["aten.addmm_.default"], indirect=True)
def test_an_accumulating_matmul_in_place(on_copies: str) -> None:
    assert "P, S(1), S(0) -> P" in check(on_copies, real(5, 4), real(5, 6), real(6, 4))


@pytest.mark.parametrize(
    ("on_copies", "args", "shape", "spec"),
    [
        ("aten.add.out", (X, Y), (5, 3), "S(1), S(1), S(1) -> S(1)"),
        ("aten.add.out", (X, real(3)), (5, 3), "S(0), R, S(0) -> S(0)"),
        ("aten.mm.out", (real(5, 6), real(6, 4)), (5, 4), "S(1), S(0), P -> P"),
        ("aten.mm.out", (real(5, 6), real(6, 4)), (5, 4), "P, R, P -> P"),
        ("aten.sum.IntList_out", (X, [0]), (3,), "S(0), P -> P"),
        ("aten.atan2.out", (X, Y), (5, 3), "S(0), S(0), S(0) -> S(0)"),
    ],
    indirect=["on_copies"],
)
def test_into_a_given_tensor(on_copies: str, args: tuple[Any, ...], shape: tuple[int, ...], spec: str) -> None:
    assert spec in check(on_copies, *args, out=torch.zeros(shape, dtype=torch.float64))


A, B, C = [real(6, 4), real(6), real(4, 6)], [positive(6, 4), positive(6), positive(4, 6)], torch.tensor(2.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("_foreach_add.List", (A, B)),
        ("_foreach_mul.Scalar", (A, 2.5)),
        ("_foreach_add.ScalarList", (A, [1.0, 2.0, 3.0])),
        ("_foreach_mul.Tensor", (A, C)),
        ("_foreach_sqrt.default", (B,)),
        ("_foreach_pow.List", (B, B)),
        ("_foreach_maximum.List", (A, B)),
    ],
)
def test_lists(op: str, args: tuple[Any, ...]) -> None:
    specs = check(f"aten.{op}", *args)
    assert any(s.endswith("-> S(0), S(0), R") for s in specs), "the dims of size 6 in the first two elements are one factor"
    assert any(s.endswith("-> P, P, P") for s in specs) == (op in ("_foreach_add.List", "_foreach_mul.Scalar", "_foreach_mul.Tensor"))


def test_lists_on_a_mesh() -> None:
    specs = {str(s) for s in check_mesh("aten._foreach_add.List", (A, B), mesh=(2, 2))}
    assert "S(0)S(1), S(0)R, RR, S(0)S(1), S(0)R, RR -> S(0)S(1), S(0)R, RR" in specs


def test_lists_in_a_model() -> None:
    graph, _ = check_eager(
        Function(lambda self, x, y: sum(torch._foreach_mul([x * 2, y], [y, x]))), leaf(4, 4), leaf(4, 4, seed=1), plans=3
    )
    assert "aten._foreach_mul.List" in targets(graph)


def test_operators_without_a_functional_form_have_no_rule() -> None:
    assert not has_rule("aten.set_.source_Tensor")
    assert not has_rule("aten.no_such_operator_.default")
    assert not has_rule("aten._foreach_norm.Scalar"), "its overloads are not those of norm"
    assert not has_rule("aten.squeeze_.dim"), "the local form of squeeze makes a new tensor"


def test_out_tensors_are_matched_by_name() -> None:
    """The first out= tensor of a call need not be the first result; here it has no dims, and the other one has."""
    outs = {"total_weight": torch.zeros((), dtype=torch.float64), "output": torch.zeros(7, dtype=torch.float64)}
    sample = Sample("aten.nll_loss_forward.output", (real(7, 6), whole(6, 7), None, 0, -100), outs)
    verdict = check_op(sample.op, [sample], budget=1)
    assert (verdict.fallback, verdict.wrong) == (False, ())
