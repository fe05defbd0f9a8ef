"""Dims that a model ties to a number, or to an input's dim that nobody named; usually the user forgot to name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from fxshard.shapes.dims import DynamicDim
from fxshard.shapes.guards import Guard


def fixes_jointly(guard: Guard) -> bool:
    """Whether it equates a number to an expression that grows with each of its two or more sizes, such as ``batch * seq == 64``."""
    if not isinstance(guard.expression, sympy.Eq) or len(guard.symbols) < 2:
        return False
    constant, rest = sympy.expand(guard.expression.lhs - guard.expression.rhs).as_coeff_Add()
    terms = rest.as_coefficients_dict()
    grows = all(base.is_polynomial() for base in terms)
    return grows and constant != 0 and len({coefficient > 0 for coefficient in terms.values()}) == 1


def tie_remedy(dims: Sequence[DynamicDim], inputs: Mapping[str, Sequence[int | None]]) -> str:
    """The remedy, for an error message, if a model ties ``dims``. ``inputs``: shapes by path, None for a dynamic size."""
    otherwise = "leave it static, or write the model without numbers that hold this size"
    found = [(dim, path, k) for dim in dims for path, k in _same_size(dim, inputs)]
    if not found:
        return otherwise
    said = " and ".join(f"dim {k} of {path} ({dim.example}) is {dim.name}" for dim, path, k in found)
    named = {path: {k: dim.name for dim, at, k in found if at == path} for _, path, _ in found}
    return f"if {said} too, name that as well: add dynamic_shapes={named} to what is named; else {otherwise}"


def _same_size(dim: DynamicDim, inputs: Mapping[str, Sequence[int | None]]) -> list[tuple[str, int]]:
    """(path, dim) of static dims of other inputs with the size of ``dim``: one per input, at the same position if possible."""
    own, places = {path for path, _ in dim.places}, [k for _, k in dim.places]
    found = []
    for path, shape in inputs.items():
        alike = [k for k, size in enumerate(shape) if size == dim.example]
        if path not in own and alike:
            found.append((path, next((k for k in alike if k in places), alike[0])))
    return found
