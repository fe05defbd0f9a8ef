"""Every operator that torch tags as core has a rule; those that always replicate give the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.mesh.mesh import Mesh
from fxshard.strategies import has_rule, local_form, op_strategy
from tests.strategies.samples import positive, real, whole, yes_no
from tests.strategies.shards import EagerContext, call_for, check

aten = torch.ops.aten


def test_core_operators_have_rules() -> None:
    """Except sym_size and the like, which have no node in a graph of static shapes."""
    packets = [p for p in (getattr(aten, name) for name in dir(aten)) if hasattr(p, "overloads")]
    core = {str(op) for p in packets for op in (getattr(p, o) for o in p.overloads()) if torch.Tag.core in op.tags}
    assert len(core) > 180
    assert {op for op in core if not has_rule(op) and not op.startswith("aten.sym_")} == set()


X, MASK = real(6, 4), yes_no(6, 4)
REPLICATED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "nonzero": ("nonzero", (MASK,), "values"),
    "masked scatter": ("masked_scatter", (X, MASK, real(24)), "order"),
    "pairs": ("_pdist_forward", (X, 2.0), "pairs"),
    "strides": ("as_strided", (X, [3, 2], [4, 1], 4), "memory"),
    "lengths": ("_ctc_loss", (real(6, 2, 4).log_softmax(-1), whole(3, 2, 2), [6, 6], [2, 2]), "lengths"),
    "larger": ("resize", (X, [8, 2]), "memory"),
    "unique": ("_unique2", (whole(5, 9),), "values"),
}


@pytest.mark.parametrize(("op", "args", "reason"), REPLICATED.values(), ids=REPLICATED)
def test_operators_that_always_replicate_give_a_reason(op: str, args: tuple[Any, ...], reason: str) -> None:
    specs = check(f"aten.{op}.default", *args)
    assert not any("S(" in s for s in specs)
    out = getattr(aten, op)(*args)
    call, _ = call_for(f"aten.{op}.default", args, {}, out if isinstance(out, tuple) else [out])
    strategy = op_strategy(call, Mesh({"a": 2}))
    assert reason in strategy.reason and not strategy.fallback


def test_views_by_memory_read_a_contiguous_copy() -> None:
    """A redistributed tensor may have other strides than the tensor had."""
    call, _ = call_for("aten.as_strided.default", (X, [6], [4]), {}, [aten.as_strided(X, [6], [4])])
    spec = op_strategy(call, Mesh({"a": 2})).specs[0]
    shard = X.mT.contiguous().mT
    assert torch.equal(local_form(call)(EagerContext(call, spec, [shard], (2,), (0,))), X[:, 0])


BAGS = (whole(7, 6), torch.tensor([0, 2, 5]))
SHARDED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "renorm": ("renorm.default", (real(6, 4, 3), 2, 1, 0.5), {}, "S(1) -> S(1)"),
    "bags, sum": ("_embedding_bag.default", (real(7, 4), *BAGS), {}, "S(1), R, R -> S(1), R, R, R"),
    "bags, maximum": ("_embedding_bag.default", (real(7, 4), *BAGS, False, 2), {}, "S(1), R, R -> S(1), R, R, S(1)"),
    "bags, weighted": ("_embedding_bag.default", (real(7, 4), *BAGS, False, 0, False, real(6)), {}, "S(1), R, R, R -> S(1), R, R, R"),
    "isin": ("isin.Tensor_Tensor", (whole(9, 6, 4), whole(9, 5)), {}, "R, S(0) -> P(max)"),
    "isin, not": ("isin.Tensor_Tensor", (whole(9, 6, 4), whole(9, 5)), {"invert": True}, "R, S(0) -> P(min)"),
    "isin, elements": ("isin.Tensor_Scalar", (whole(9, 6, 4), 3), {}, "S(1) -> S(1)"),
    "isin, one element": ("isin.Scalar_Tensor", (3, whole(9, 6, 4)), {}, "S(1) -> P(max)"),
    "index copy": ("index_copy.default", (X, 0, torch.tensor([3, 1]), real(2, 4)), {}, "S(1), R, S(1) -> S(1)"),
    "index fill": ("index_fill.int_Scalar", (X, 1, torch.tensor([3, 1]), 2.0), {}, "S(0), R -> S(0)"),
    "take": ("take.default", (X, whole(24, 5, 3)), {}, "R, S(0) -> S(0)"),
    "scatter, reduced": ("scatter.reduce", (X, 0, whole(6, 3, 4), real(3, 4)), {"reduce": "add"}, "S(1), S(1), S(1) -> S(1)"),
    "rot90": ("rot90.default", (real(5, 4, 3), 1, [0, 2]), {}, "S(1) -> S(1)"),
    "channel shuffle": ("channel_shuffle.default", (real(2, 6, 3, 4), 2), {}, "S(3) -> S(3)"),
    "diagonal made": ("diag_embed.default", (real(5, 3),), {}, "S(0) -> S(0)"),
    "diagonal replaced": ("diagonal_scatter.default", (real(5, 3, 4), real(5, 3), 0, 1, 2), {}, "S(0), S(0) -> S(0)"),
    "a copied part": ("narrow_copy.default", (X, 0, 1, 3), {}, "S(1) -> S(1)"),
    "view copied": ("view_copy.default", (X, [3, 8]), {}, "S(0) -> S(0)"),
    "transposed copy": ("transpose_copy.int", (X, 0, 1), {}, "S(0) -> S(1)"),
    "max_unpool": ("max_unpool2d.default", (real(3, 2, 2), whole(4, 3, 2, 2) * 2, [4, 4]), {}, "S(0), S(0) -> S(0)"),
    "fractional": (
        "fractional_max_pool2d.default",
        (real(3, 5, 6, 6), [2, 2], [3, 3], positive(3, 5, 2) / 9),
        {},
        "S(1), S(1) -> S(1), S(1)",
    ),
    "antialiased": ("_upsample_bilinear2d_aa.default", (real(3, 5, 6, 6), [3, 3], False), {}, "S(1) -> S(1)"),
    "grid": ("affine_grid_generator.default", (real(3, 2, 3), [3, 1, 4, 5], False), {}, "S(0) -> S(0)"),
    "batch norm": (
        "_native_batch_norm_legit.default",
        (real(5, 6, 3), None, None, real(6), positive(6), True, 0.1, 1e-5),
        {},
        "S(1), S(0), S(0) -> S(1), S(0), S(0)",
    ),
}


@pytest.mark.parametrize(("op", "args", "kwargs", "spec"), SHARDED.values(), ids=SHARDED)
def test_one_spec_that_shards(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], spec: str) -> None:
    assert spec in check(f"aten.{op}", *args, **kwargs)


def test_gradients_of_embedding_bags() -> None:
    out, bag, size, most = aten._embedding_bag(real(7, 4), *BAGS, False, 0)
    args = (out, BAGS[0], bag, size, most, 7, False, 0, None)
    assert "S(1), R, R, R, R -> S(1)" in check("aten._embedding_bag_dense_backward.default", *args)
    specs = check("aten._embedding_bag_per_sample_weights_backward.default", out, real(7, 4), *BAGS, whole(1, 6), 0)
    assert {"S(1), S(1), R, R, R -> P", "P, R, R, R, R -> P"} <= specs


def test_other_products() -> None:
    assert "S(1), S(0) -> P" in check("aten._int_mm.default", whole(9, 20, 16).to(torch.int8), whole(9, 16, 8).to(torch.int8))
    assert "P, S(0), S(0) -> P" in check("aten.addbmm.default", real(5, 4), real(6, 5, 3), real(6, 3, 4))
    assert "S(0), S(0), R -> S(0)" in check("aten.addr.default", real(5, 4), real(5), real(4))
    assert "R, S(0), R -> S(0)" in check("aten._addmm_activation.default", real(4), real(5, 3), real(3, 4))
    assert "S(0), S(0) -> P" in check("aten.vdot.default", real(5), real(5))


def test_the_added_tensor_broadcasts() -> None:
    assert "S(0), S(1), R -> P" not in check("aten.addbmm.default", real(4), real(6, 5, 3), real(6, 3, 4))
    assert "R, R, S(2) -> S(1)" in check("aten.addbmm.default", real(1), real(6, 5, 3), real(6, 3, 4))
    assert "S(0), R, S(0) -> S(1)" in check("aten.addr.default", real(4), real(5), real(4))
