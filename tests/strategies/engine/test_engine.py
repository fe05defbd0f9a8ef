"""From rules to strategies: order of specs, legality, products over axes, cache, fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxshard.errors import RuleError
from fxshard.mesh.mesh import Mesh
from fxshard.strategies import (
    Call,
    Operand,
    TensorMeta,
    cache_info,
    created_reductions,
    einop_rule,
    has_rule,
    lookup,
    op_strategy,
    rule,
)
from fxshard.strategies.engine import registry
from fxshard.strategies.engine.engine import aligned


def _call(op: str, operands: list[tuple[int, ...]], outputs: list[tuple[int, ...]], *rest: Any) -> Call:
    metas = [tuple(TensorMeta(s, torch.float32) for s in shapes) for shapes in (operands, outputs)]
    return Call(op, (*map(Operand, range(len(operands))), *rest), (), *metas)


def _specs(call: Call, *shape: int) -> list[str]:
    return [str(s) for s in op_strategy(call, Mesh({f"a{i}": n for i, n in enumerate(shape)})).specs]


@pytest.fixture
def temporary(own_rules: None) -> Any:
    """``register``; its rules are removed after the test."""
    return registry.register


MM = _call("aten.mm.default", [(8, 6), (6, 4)], [(8, 4)])


def test_replicated_comes_first_and_the_order_is_fixed() -> None:
    assert _specs(MM, 2)[:4] == ["R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> P", "R, S(1) -> S(1)"]


def test_two_axes_are_a_product() -> None:
    specs = _specs(MM, 2, 2)
    assert specs[0] == "RR, RR -> RR"
    assert len(specs) == len(set(specs)) == 8 * 8
    assert {"S(0)R, RS(1) -> S(0)S(1)", "S(0)S(1), RS(0) -> S(0)P", "S(1)S(1), S(0)S(0) -> PP"} <= set(specs)


def test_three_axes() -> None:
    assert len(_specs(MM, 2, 2, 2)) == 8**3


def test_reductions_that_do_not_occur_can_be_left_out() -> None:
    few = op_strategy(MM, Mesh({"a": 2, "b": 2}), ("sum",)).specs
    assert len(few) == 36
    assert not any("avg" in str(s) for s in few)


@pytest.mark.parametrize(
    ("size", "inner", "parts", "legal"),
    [
        (8, 64, (4,), True),
        (5, 64, (4,), False),
        (5, 64, (5,), True),
        (8, 64, (2, 2), True),
        (6, 64, (4,), False),
        (6, 1, (4,), True),
        (3, 2, (2,), False),
        (7, 3, (2, 2), False),
    ],
)
def test_alignment_of_merged_dims(size: int, inner: int, parts: tuple[int, ...], legal: bool) -> None:
    assert aligned(size, inner, parts) == legal


def test_five_heads_over_four_ranks() -> None:
    assert "S(1) -> S(1)" not in _specs(_call("aten.view.default", [(2, 5, 64)], [(2, 320)], (2, 320)), 4)
    assert "S(1) -> S(1)" in _specs(_call("aten.view.default", [(2, 8, 64)], [(2, 512)], (2, 512)), 4)


def test_alignment_holds_over_all_axes_of_a_factor() -> None:
    specs = _specs(_call("aten.view.default", [(2, 4, 6)], [(2, 24)], (2, 24)), 2, 4)
    assert "S(1)R -> S(1)R" in specs
    assert "S(1)S(1) -> S(1)S(1)" not in specs


def test_uneven_and_empty_shards_are_legal() -> None:
    assert "S(0), R -> S(0)" in _specs(_call("aten.mm.default", [(5, 6), (6, 4)], [(5, 4)]), 4)
    assert "S(0), R -> S(0)" in _specs(_call("aten.mm.default", [(2, 6), (6, 4)], [(2, 4)]), 4)


def test_pending_reductions_of_one_tensor_commute() -> None:
    specs = _specs(_call("aten.clone.default", [(8,)], [(8,)]), 2, 2)
    assert {"PP -> PP", "PP(avg) -> PP(avg)", "P(max)P(max) -> P(max)P(max)"} <= set(specs)
    assert "PP(max) -> PP(max)" not in specs


def test_without_a_rule_everything_is_replicated_with_a_reason() -> None:
    call = _call("mylib.unknown.default", [(8, 6)], [(8,)])
    strategy = op_strategy(call, Mesh({"a": 2, "b": 2}))
    assert [str(s) for s in strategy.specs] == ["RR -> RR"]
    assert strategy.fallback
    assert "mylib.unknown.default" in strategy.reason
    assert lookup("mylib.unknown.default") is None and not has_rule("mylib.unknown.default")


def test_missing_outputs_are_replicated() -> None:
    call = Call(
        "fxshard.dropout.default",
        (Operand(0), 0.1, Operand(1), 0),
        (),
        MM.operands[:1] + (TensorMeta((), torch.int64),),
        (MM.operands[0], None),
    )
    assert {str(s) for s in op_strategy(call, Mesh({"a": 2})).specs} >= {"S(0), R -> S(0), R"}


def test_the_second_call_hits_the_cache() -> None:
    call = _call("aten.mm.default", [(16, 6), (6, 4)], [(16, 4)])
    first = op_strategy(call, Mesh({"a": 2}))
    hits = cache_info().hits
    assert op_strategy(call, Mesh({"other_name": 2})) is first
    assert cache_info().hits == hits + 1
    assert cache_info().maxsize is not None


def test_reductions_that_an_operator_creates() -> None:
    assert created_reductions(MM) == {"sum"}
    assert created_reductions(_call("aten.amax.default", [(8, 6)], [(8,)], (1,))) == {"max"}
    assert created_reductions(_call("aten.relu.default", [(8, 6)], [(8, 6)])) == frozenset()


def test_registered_rules(temporary: Any) -> None:
    call = _call("mylib.scale.default", [(8, 6), (6,)], [(8, 6)])
    assert op_strategy(call, Mesh({"a": 2})).fallback
    temporary("mylib.scale.default", einop_rule("b h, h -> b h"))
    assert "S(1), S(0) -> S(1)" in _specs(call, 2)
    with pytest.raises(RuleError, match="has a rule already"):
        temporary("mylib.scale.default", einop_rule("b h, h -> b h"))
    temporary("mylib.scale.default", rule("b! h!, h! -> b! h!"), override=True)
    assert _specs(call, 2) == ["R, R -> R"]


def test_an_operand_written_in_place_has_the_layout_of_the_output(temporary: Any) -> None:
    temporary("mylib.accumulate_.default", einop_rule("n, b n -> n", enforce={0: 0}))
    call = _call("mylib.accumulate_.default", [(6,), (4, 6)], [(6,)])
    assert set(_specs(call, 2)) == {"R, R -> R", "S(0), S(1) -> S(0)", "P, R -> P", "P(avg), R -> P(avg)"}


def test_a_factor_twice_in_a_tensor_is_not_sharded(temporary: Any) -> None:
    from fxshard.strategies import factors

    temporary("mylib.trace.default", lambda call: factors([["i", "i"]], [["i"]]))
    assert _specs(_call("mylib.trace.default", [(4, 4)], [(4,)]), 2) == ["R -> R"]


def test_symbolic_sizes() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    batch = ShapeEnv().create_unbacked_symint()
    call = _call("aten.view.default", [(batch, 32, 128)], [(batch, 4096)], (batch, 4096))
    assert {"S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"} & set(_specs(call, 4)) == {"S(0) -> S(0)", "S(1) -> S(1)"}
