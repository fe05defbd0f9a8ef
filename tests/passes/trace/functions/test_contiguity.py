"""The conditions under which a reshape or ``contiguous`` shares memory, compared with torch."""

from __future__ import annotations

import itertools

import pytest
import sympy
import torch

from fxshard._torch_compat.sizes.symbols import SymbolEnv, expression
from fxshard.passes.trace.functions.contiguity import is_contiguous_if, is_viewed_if

SHAPES = tuple(itertools.product((1, 2, 4), repeat=3))


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("cut", [False, True])
def test_numeric_shapes(order: tuple[int, ...], cut: bool) -> None:
    for shape in SHAPES:
        x = torch.zeros(shape[0], shape[1] + cut, shape[2])[:, : shape[1]].permute(order)
        assert is_contiguous_if(x.shape, x.stride()) == sympy.sympify(shares(x, x.contiguous()))
        a, b, c = x.shape
        for new in ((a, b, c), (a * b, c), (a, b * c), (a * b * c,), (b, a, c), (c, a * b), (a, 1, b, c), (2, a * b * c // 2)):
            if a * b * c == torch.Size(new).numel():
                assert is_viewed_if(x.shape, x.stride(), new) == sympy.sympify(shares(x, x.reshape(new))), (x.shape, x.stride(), new)


def test_symbolic_shapes() -> None:
    env = SymbolEnv()
    b, t = env.symbol("b", 3, least=1), env.symbol("t", 5, least=1)
    one_row, one_step = (sympy.Eq(expression(s), 1) for s in (b, t))
    assert is_contiguous_if((t, b, 4), (4, 4 * t, 1)) == sympy.Or(one_row, one_step)
    assert is_viewed_if((t, b, 4), (4, 4 * t, 1), (t * b, 4)) == sympy.Or(one_row, one_step)
    assert is_viewed_if((t, b, 4), (4, 4 * t, 1), (t, b, 2, 2)) == sympy.true
    assert is_contiguous_if((b, 8, 4), (4 * t, 4, 1)) == sympy.Or(one_row, sympy.Eq(expression(t), 8))
    assert is_contiguous_if((b, t - 1), (t, 1)) == one_row
