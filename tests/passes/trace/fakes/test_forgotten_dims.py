"""A dim dynamic in one input, but forgotten in another of equal size: the same error on all meshes, which says what to name."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F

import fxshard
from fxshard.errors import StaticDimError
from fxshard.shapes import Guard, fixes_jointly

BOTH = {0: "batch", 1: "seq"}
MESHES = ({"a": 1}, {"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2})


class Tagger(nn.Module):
    """The loss over all tokens: tokens and targets must have the same product of batch and length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.embed(tokens)).flatten(0, 1), targets.flatten())


class Fits(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.view(6, 4) * 2).sum() + y.sum()


def plan(model: nn.Module, args: tuple[Any, ...], shape: dict[str, int], **dynamic: dict[int, str]) -> fxshard.ShardingPlan:
    return fxshard.plan(model, args, fxshard.Mesh(shape, hardware="h100"), cache=False, dynamic_shapes=dynamic)


def tokens(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 12, (batch, seq)), torch.randint(0, 12, (batch, seq))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("named", "forgotten"), [("tokens", "args[1]"), ("targets", "args[0]")])
def test_batch_and_length_forgotten(shape: dict[str, int], named: str, forgotten: str) -> None:
    with pytest.raises(StaticDimError, match=r"batch .* and seq .* cannot change freely: .*batch\*seq.*test_forgotten_dims") as caught:
        plan(Tagger(), tokens(4, 6), shape, **{named: BOTH})
    assert f"dynamic_shapes={ {forgotten: BOTH} }" in str(caught.value)
    assert f"if dim 0 of {forgotten} (4) is batch and dim 1 of {forgotten} (6) is seq too" in str(caught.value)


def test_the_batch_alone() -> None:
    with pytest.raises(StaticDimError, match=r"cannot change, the model fixes it to 4: .*6\*batch == 24") as caught:
        plan(Tagger(), tokens(4, 6), {"dp": 2}, tokens={0: "batch"})
    assert "dynamic_shapes={'args[1]': {0: 'batch'}}" in str(caught.value)


def test_the_advice_in_the_error_works() -> None:
    model = Tagger().double()
    made = plan(model, tokens(4, 6), {"dp": 2}, **{"tokens": BOTH, "args[1]": BOTH})
    for batch, seq in ((4, 6), (2, 12), (8, 5)):
        args = tokens(batch, seq)
        torch.testing.assert_close(fxshard.simulate(model, args, made).outputs, model(*args), rtol=1e-9, atol=1e-9)


def test_a_size_that_the_model_fixes_is_not_blamed_on_an_input() -> None:
    with pytest.raises(StaticDimError, match=r"rows .* cannot change, the model fixes it to 6") as caught:
        plan(Fits(), (torch.ones(6, 4), torch.ones(5, 3)), {"dp": 2}, x={0: "rows"})
    assert "args[1]" not in str(caught.value) and "to do: leave it static, or write the model without numbers" in str(caught.value)


def test_equalities_that_allow_few_sizes() -> None:
    a, b, c = (sympy.Symbol(name, integer=True, positive=True) for name in "abc")

    def bounded(condition: sympy.Basic) -> bool:
        return fixes_jointly(Guard(condition, tuple((str(s), s, 1) for s in sorted(condition.free_symbols, key=str)), "m.py:1"))

    assert all(map(bounded, (sympy.Eq(a * b, 64), sympy.Eq(64, a * b), sympy.Eq(2 * a + b * c, 9), sympy.Eq(a + 1, 9 - b))))
    open_ended = (sympy.Eq(a, b), sympy.Eq(a, b + 1), sympy.Eq(a * b, c), sympy.Ne(a * b, 64), a * b <= 64, sympy.Eq(a // b, 3))
    assert not any(map(bounded, (*open_ended, sympy.Eq(a, 4))))
