"""Private names of torch (2.13): write an expression of sizes as calls of Python's and torch's operators on proxies of its symbols.

What would replace it: a conversion of expressions to FX nodes outside of a traced graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxshard._torch_compat.sizes.expressions import divided


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, or, if an argument is a proxy, add the call to its graph."""
    proxy = next((a for a in args if isinstance(a, fx.Proxy)), None)
    return function(*args) if proxy is None else proxy.tracer.create_proxy("call_function", function, args, {})


class _Spelling(PythonReferenceAnalysis):
    """torch's analysis, with replacements for functions that do not accept proxies or are missing."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def truediv(a: Any, b: Any) -> Any:
        return _call(divided, a, b)

    @staticmethod
    def trunc_to_int(a: Any, dtype: Any) -> Any:
        return torch.sym_int(a)

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def round_to_int(a: Any, dtype: Any) -> Any:
        return _call(round, a)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return torch.sym_ite(condition, a, b)

    @staticmethod
    def modular_indexing(base: Any, divisor: Any, modulus: Any) -> Any:
        return (base // divisor) % modulus


def expression_as_calls(expr: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """The expression as calls in the graph of the proxies in ``values``; a number if all values are numbers."""
    return sympy_interp(_Spelling, dict(values), expr)
