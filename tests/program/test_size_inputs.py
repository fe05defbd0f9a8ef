"""Sizes in a graph become calls that compute them from the program's inputs: every function that an expression of sizes may contain."""

from __future__ import annotations

import pytest
import sympy
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from fxshard._torch_compat.inductor.expression_calls import expression_as_calls
from fxshard._torch_compat.sizes.expressions import FUNCTIONS as OF
from fxshard._torch_compat.sizes.symbols import evaluated

N = sympy.Symbol("n", integer=True, positive=True)
HALF = OF["IntTrueDiv"](N, 2)
EXPRESSIONS = [
    *(HALF, OF["IntTrueDiv"](1, N), OF["FloatTrueDiv"](2.0, OF["ToFloat"](N)), OF["FloatPow"](OF["ToFloat"](N), 0.5)),
    *(OF["PowByNatural"](N, 2), OF["Mod"](N, 3), OF["PythonMod"](N, 3), OF["FloorDiv"](N, 3), OF["CeilDiv"](N, 3)),
    *(OF["Max"](N, 3), OF["Min"](N, 3), OF["FloorToInt"](HALF), OF["CeilToInt"](HALF), OF["TruncToInt"](HALF), OF["RoundToInt"](HALF)),
    *(OF["Where"](N > 3, N, sympy.Integer(3)), OF["ModularIndexing"](N, 2, 3), sympy.Ne(N, 3), N * (N + 1) - 2),
]


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_the_calls_compute_the_expression(expression: sympy.Basic) -> None:
    graph = fx.Graph()
    made = expression_as_calls(expression, {N: fx.Proxy(graph.placeholder("n"), GraphAppendingTracer(graph))})
    graph.output(made.node)
    function = fx.GraphModule({}, graph)
    for size in (1, 2, 3, 4, 5, 7, 12):
        assert function(size) == pytest.approx(float(evaluated(expression, {N: sympy.Integer(size)})), abs=1e-12), size
