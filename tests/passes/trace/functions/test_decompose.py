"""Operators without a rule are decomposed by torch's core table, and sharded by the rules of their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxshard
from fxshard.passes.annotation.annotate import annotate
from fxshard.passes.trace.functions.decompose import planning_decompositions
from fxshard.passes.trace.trace import trace
from fxshard.strategies import has_rule
from tests.passes.tracing import TWO, Function, check_eager, real, targets

CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "linalg_cross": (torch.linalg.cross, (real(4, 3), real(4, 3, seed=1))),
    "nansum": (lambda x: torch.nansum(x, 1), (real(4, 6),)),
    "aminmax": (lambda x: torch.aminmax(x, dim=1), (real(4, 6),)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_parts_are_sharded(name: str) -> None:
    """Results and gradients equal those of the operator, under random plans of its parts."""
    function, args = CASES[name]
    assert not has_rule(f"aten.{name}.default")
    graph, _ = check_eager(Function(lambda self, *given: function(*given)), *args, plans=2)
    annotated = annotate(graph, TWO)
    assert annotated.fallbacks == () and f"aten.{name}.default" not in targets(graph)
    assert any(layout.axes_on(0) for specs in annotated.specs.values() for spec in specs for layout in spec.outputs)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_negative_log_likelihood_of_aten(reduction: int) -> None:
    """The operator behind ``F.nll_loss``: a mean (1) is the quotient of two sums over the batch, each of which may be sharded; the loss of
    each row (0) and the sum (2) stay as they are."""
    target, weight = torch.tensor([0, 3, -100, 2]), torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    model = Function(lambda self, x: torch.ops.aten.nll_loss.default(x, target, weight, reduction))
    graph, _ = check_eager(model, real(4, 4), plans=3)
    assert ("aten.div.Tensor" in targets(graph)) == (reduction == 1)


def test_a_rule_keeps_the_operator_whole(own_rules: None) -> None:
    model, args = Function(lambda self, x, y: torch.linalg.cross(x, y)), CASES["linalg_cross"][1]
    before = trace(model, args, train=False)
    fxshard.register_rule("aten::linalg_cross", "b c!, b c! -> b c!", linear=[[0], [1]])
    after = trace(model, args, train=False)
    assert "aten.linalg_cross.default" not in targets(before) and targets(after) == {"aten.linalg_cross.default"}
    assert before.hash != after.hash
    check_eager(model, *args, train=False)


def test_random_operators_and_those_with_a_rule_are_not_decomposed() -> None:
    table = planning_decompositions()
    modules = [f"fxshard.passes.trace.functions.{name}" for name in ("decompose", "norms")]
    ours = {op for op in table if table[op].__module__ in modules}
    assert len(table) > 100 and len(ours) < 25
    assert not [op for op in table if op not in ours and (has_rule(str(op)) or torch.Tag.nondeterministic_seeded in op.tags)]


def test_a_new_tensor_of_the_dtype_of_another_does_not_read_it() -> None:
    """So it says nothing about the other's layout."""
    fill = lambda self, x: x.new_zeros(3, 4) + x.new_ones(4) + x.new_full((3, 1), 2) + x.new_zeros(3, 4, dtype=torch.int32) + x[:3]  # noqa: E731
    graph, _ = check_eager(Function(fill), real(6, 4), plans=2)
    assert {"aten.zeros.default", "aten.ones.default", "aten.full.default"} <= targets(graph)
    assert not any(target.startswith("aten.new_") for target in targets(graph))
