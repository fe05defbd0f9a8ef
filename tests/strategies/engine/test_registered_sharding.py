"""Functions given to torch's register_sharding: which specs they give, the order in which rules are looked up, uneven sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import fxshard
from fxshard._torch_compat.dtensor.rules import sharding_functions
from fxshard.errors import RuleError
from fxshard.strategies import Call, Operand, TensorMeta, op_strategy
from tests.custom_operators import Gated
from tests.passes.tracing import Function, check_eager, real

GATE_OP, BACKWARD_OP = torch.ops.tests.gate.default, torch.ops.tests.gate_backward.default


@torch.library.custom_op("tests::pairs", mutates_args=())
def pairs(x: Tensor, shift: float, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sums of neighbours in dim 0, and the maximum over it."""
    both = x.view(-1, 2, x.shape[1]).sum(1) + shift
    return (both if bias is None else both + bias), x.amax(0)


pairs.register_fake(lambda x, shift, bias=None: (x.new_empty(x.shape[0] // 2, x.shape[1]), x.new_empty(x.shape[1])))
PAIRS_OP = torch.ops.tests.pairs.default


@pytest.fixture(autouse=True)
def functions(own_rules: None) -> Iterator[None]:
    """Removes after each test what it registered with DTensor."""
    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    before = dict(known)
    yield
    known.clear()
    known.update(before)


def gate_sharding(x: Any, scale: Any) -> Any:
    listed = [([Replicate()], [Replicate(), Replicate()])]
    listed += [([Shard(d)], [Shard(d), Replicate()]) for d in range(x.ndim - 1)]
    return [*listed, ([Shard(x.ndim - 1)], [Shard(x.ndim - 1), Shard(0)])]


def backward_sharding(grad: Any, x: Any, scale: Any) -> Any:
    listed = [([Shard(d), Partial()], [Shard(d), Shard(d), Replicate()]) for d in range(2)]
    return [*listed, ([Shard(2), Shard(0)], [Shard(2), Shard(2), Shard(0)])]


def pairs_sharding(x: Any, shift: float, bias: Any = None) -> Any:
    assert isinstance(shift, float) and x.shape == (x.shape[0], 4) and x.tensor_meta.dtype == torch.float64
    if bias is not None:
        return [([Shard(0), Partial("max")], [Shard(0), None, Replicate()]), ([Shard(1), Shard(0)], [Shard(1), None, Shard(0)])]
    return [([Shard(0), Partial("max")], [Shard(0), None, None]), ([Shard(1), Shard(0)], [Shard(1), None])]


def specs(call: Call, **axes: int) -> set[str]:
    return {str(s) for s in op_strategy(call, fxshard.Mesh(axes)).specs}


def gate_call(*shape: int) -> Call:
    metas = TensorMeta(shape, torch.float64), TensorMeta(shape[-1:], torch.float64)
    return Call("tests.gate.default", (Operand(0), Operand(1)), (), metas, metas[:1])


def pairs_call(rows: int) -> Call:
    metas = (TensorMeta((rows, 4), torch.float64),)
    outs = TensorMeta((rows // 2, 4), torch.float64), TensorMeta((4,), torch.float64)
    return Call("tests.pairs.default", (Operand(0), 0.5), (), metas, outs)


def test_the_order_of_look_up() -> None:
    """First no rule, then a function of register_sharding, then a rule of fxshard. The cache keeps no outdated answer."""
    call = gate_call(4, 6, 8)
    assert op_strategy(call, fxshard.Mesh({"a": 2})).fallback
    register_sharding(GATE_OP)(lambda x, scale: [([Shard(1)], [Shard(1), Replicate()])])
    assert specs(call, a=2) == {"R, R -> R", "S(1), R -> S(1)"}
    assert not op_strategy(call, fxshard.Mesh({"a": 2})).fallback
    register_sharding([GATE_OP])(gate_sharding)
    assert specs(call, a=2) == {"R, R -> R", "S(0), R -> S(0)", "S(1), R -> S(1)", "S(2), S(0) -> S(2)"}
    fxshard.register_rule("tests::gate", "b s! h, h -> b s! h")
    assert specs(call, a=2) == {"R, R -> R", "S(0), R -> S(0)", "S(2), S(0) -> S(2)"}


def test_a_rule_of_fxshard_comes_before_a_function() -> None:
    call = Call("aten.relu.default", (Operand(0),), (), (TensorMeta((4,), torch.float64),), (TensorMeta((4,), torch.float64),))
    before = specs(call, a=2)
    register_sharding(torch.ops.aten.relu.default)(lambda x: [([Replicate()], [Replicate()])])
    assert specs(call, a=2) == before and "S(0) -> S(0)" in before


def test_torchs_own_strategies_are_not_used() -> None:
    assert DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert sharding_functions() == {}
    register_sharding(GATE_OP)(gate_sharding)
    assert sharding_functions() == {"tests.gate.default": gate_sharding}


def test_two_axes() -> None:
    register_sharding(GATE_OP)(gate_sharding)
    found = specs(gate_call(4, 6, 8), a=2, b=2)
    assert {"S(0)S(1), RR -> S(0)S(1)", "S(2)S(0), S(0)R -> S(2)S(0)", "S(2)S(2), S(0)S(0) -> S(2)S(2)"} <= found and len(found) == 16


def test_options_that_shard_one_dim_in_two_ways_are_not_combined() -> None:
    register_sharding(GATE_OP)(lambda x, s: [([Shard(0)], [Shard(0), Replicate()]), ([Shard(0)], [Shard(0), Shard(0)])])
    assert specs(gate_call(4, 4, 4), a=2, b=2) == {
        *("RR, RR -> RR", "S(0)R, RR -> S(0)R", "RS(0), RR -> RS(0)", "S(0)S(0), RR -> S(0)S(0)"),
        *("S(0)R, S(0)R -> S(0)R", "RS(0), RS(0) -> RS(0)", "S(0)S(0), S(0)S(0) -> S(0)S(0)"),
    }


@pytest.mark.parametrize(
    ("rows", "ranks", "legal"), [(8, 2, True), (8, 4, True), (6, 2, False), (6, 3, True), (10, 4, False), (8, 3, False)]
)
def test_dims_of_different_sizes_are_sharded_only_if_both_align(rows: int, ranks: int, legal: bool) -> None:
    """The operator halves the rows, so the rows of a rank must be whole pairs. 8 rows on 3 ranks are 3, 3, 2, which are not."""
    register_sharding(PAIRS_OP)(pairs_sharding)
    assert ("S(0) -> S(0), P(max)" in specs(pairs_call(rows), a=ranks)) is legal


def test_dims_counted_from_the_last() -> None:
    """Negative dims count from the end of each tensor: the last dim of x is its third, that of the scale its first."""
    register_sharding(GATE_OP)(lambda x, s: [([Shard(-1)], [Shard(-1), Shard(-1)]), ([Shard(-3)], [Shard(0), Replicate()])])
    assert specs(gate_call(4, 6, 8), a=2) == {"R, R -> R", "S(2), S(0) -> S(2)", "S(0), R -> S(0)"}
    assert len(specs(gate_call(4, 6, 8), a=2, b=2)) == 9


def test_an_average_needs_equal_shards() -> None:
    register_sharding(GATE_OP)(lambda x, s: [([Partial("avg")], [Shard(0), Replicate()])])
    assert "S(0), R -> P(avg)" in specs(gate_call(4, 3, 2), a=2) and "S(0), R -> P(avg)" not in specs(gate_call(5, 3, 2), a=2)


WRONG = {
    "offers S\\(3\\) for a tensor of 3 dims": lambda x, s: [([Shard(0)], [Shard(3), Replicate()])],
    "offers S\\(-4\\) for a tensor of 3 dims": lambda x, s: [([Shard(-4)], [Shard(0), Replicate()])],
    "places 1 arguments where 2 are tensors": lambda x, s: [([Shard(0)], [Shard(0)])],
    "places 2 results, there are 1": lambda x, s: [([Shard(0), Shard(0)], [Shard(0), Replicate()])],
    "raises ZeroDivisionError": lambda x, s: [([Shard(0)], [Shard(0), 1 // 0])],
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_functions_are_refused(said: str) -> None:
    register_sharding(GATE_OP)(WRONG[said])
    with pytest.raises(RuleError, match=rf"register_sharding has for tests\.gate\.default {said}"):
        specs(gate_call(4, 6, 8), a=2)


def test_a_model_with_registered_functions() -> None:
    """Forward and backward in float64 with random plans on 2 x 2 ranks; sizes 5 and 3 give uneven and empty shards."""
    register_sharding(GATE_OP)(gate_sharding)
    register_sharding(BACKWARD_OP)(backward_sharding)
    torch.manual_seed(0)
    check_eager(Gated().double(), real(5, 3, 6), plans=10)
    register_sharding(PAIRS_OP)(pairs_sharding)
    check_eager(Function(lambda self, x: pairs(x, 0.5)), real(8, 4, grad=False), train=False, plans=6)
    check_eager(Function(lambda self, x: pairs(x, 0.5, x[0])), real(8, 4, grad=False), train=False, plans=3)
