"""Private names of torch (2.13): the functions, of torch and of sympy, that occur in expressions of sizes.

What would replace it: a documented list of the functions in expressions of sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as of_torch

_OF_TORCH = (
    *("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "Min", "Max", "Where", "PowByNatural"),
    *("IntTrueDiv", "FloatTrueDiv", "FloatPow", "ToFloat", "TruncToFloat"),
    *("CeilToInt", "FloorToInt", "TruncToInt", "RoundToInt", "OpaqueUnaryFn_sqrt"),
)
_OF_SYMPY = (
    *("Add", "Mul", "Pow", "Abs", "And", "Or", "Not", "Piecewise", "ExprCondPair"),
    *("Equality", "Unequality", "StrictGreaterThan", "StrictLessThan", "GreaterThan", "LessThan"),
)
FUNCTIONS: Mapping[str, Callable[..., sympy.Basic]] = {
    **{name: getattr(sympy, name) for name in _OF_SYMPY if name != "ExprCondPair"},
    "ExprCondPair": sympy.functions.elementary.piecewise.ExprCondPair,
    **{name: getattr(of_torch, name) for name in _OF_TORCH},
}
"""The functions that an expression of sizes may call, by their names in ``sympy.srepr`` and ``torch.export``."""

WHOLE = ("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "PowByNatural")
"""The functions of integers only. torch's implementations do not check this, and can recurse without end."""

SIZE_CALLS: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_min", "sym_max", "sym_float", "sym_int", "sym_ite", "sym_not")},
    **{f"_operator.{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "torch._sym_sqrt": torch._sym_sqrt,
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil")},
}
"""The functions that a stored graph may call to compute sizes, by their names in ``torch.export``."""


def divided(above: Any, below: Any) -> Any:
    """``above / below``. Floats divided by zero give inf or nan, as in C++; two integers raise ZeroDivisionError."""
    numbers = isinstance(above, (int, float)) and isinstance(below, (int, float))
    if numbers and below == 0 and float in (type(above), type(below)):
        return above * math.copysign(math.inf, below) if above else math.nan
    return above / below
