"""The common factor of two dims that a view merges or splits, for numbers and symbolic sizes."""

from __future__ import annotations

from fxshard._torch_compat.sizes.symbols import SymbolEnv
from fxshard.strategies.tensors.views import _common


def test_common_factors() -> None:
    env = SymbolEnv()
    n, m = env.symbol("n", hint=6), env.symbol("m", hint=5)
    assert _common(12, 18) == 6 and _common(4, 9) is None
    assert _common(n, n) is n
    for a, b in ((n, 4 * n), (4 * n, n), (n, n * m), (n * m, n)):
        common = _common(a, b)
        assert common is not None and common.node.expr == n.node.expr
    assert _common(n, m) is None and _common(n, 2) is None and _common(2, n) is None
