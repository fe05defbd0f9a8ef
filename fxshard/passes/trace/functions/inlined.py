"""torch functions that Dynamo cannot capture, rewritten as Python functions that it can trace through.

For unsupported arguments they raise NotImplementedError, not an FxshardError: Dynamo interprets the raise as part of the model, and
``trace_errors`` turns it into a TraceError that names the user's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fxshard._torch_compat.dynamo.replaced_calls import captured_instead
from fxshard._torch_compat.operators import scaled_mm_by_recipes

aten = torch.ops.aten


def inlined() -> AbstractContextManager[None]:
    """While Dynamo captures a model: replaces the functions in ``INLINED``."""
    return captured_instead(INLINED)


def resize_(self: Tensor, *size: Any, memory_format: torch.memory_format | None = None) -> Tensor:
    """Changes the shape of ``self`` in place."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    return _resized(self, shape, memory_format)


def resize_as_(input: Tensor, the_template: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return _resized(input, the_template.shape, memory_format)


def _resized(x: Tensor, shape: Sequence[int], memory_format: torch.memory_format | None) -> Tensor:
    """Elements keep their place in memory, in contiguous order, as torch's functionalisation assumes."""
    if memory_format not in (None, torch.contiguous_format):
        raise NotImplementedError(f"a tensor is resized to {memory_format}")
    aten.resize_(x, shape)
    return x


def tensor_split(input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Split indices in a tensor become numbers, so that the parts' sizes depend on data. The number of parts must not."""
    given = [_listed(a) for a in args]
    named = {NAMES.get(k, k): _listed(v) for k, v in kwargs.items()}
    return aten.tensor_split(input, *given, **named)


NAMES = {"tensor_indices_or_sections": "indices"}


def _listed(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0:
        raise NotImplementedError("tensor_split takes the number of parts from a tensor; give it a number")
    return value.tolist()


def scaled_mm(
    input: Tensor,
    mat2: Tensor,
    scale_a: Sequence[Tensor],
    recipe_a: Sequence[Any],
    swizzle_a: Sequence[Any],
    scale_b: Sequence[Tensor],
    recipe_b: Sequence[Any],
    swizzle_b: Sequence[Any],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Recipes and swizzles may be members of torch's enumerations, or the numbers that the operator takes."""
    recipe_a, swizzle_a, recipe_b, swizzle_b = (_numbers(x) for x in (recipe_a, swizzle_a, recipe_b, swizzle_b))
    return aten._scaled_mm_v2(
        input, mat2, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, contraction_dim, use_fast_accum
    )


def _numbers(members: Sequence[Any]) -> list[int]:
    return [m if isinstance(m, int) else m.value for m in members]


INLINED: dict[Any, Callable[..., Any]] = {
    Tensor.resize_: resize_,
    Tensor.resize_as_: resize_as_,
    torch.resize_as_: resize_as_,
    torch.tensor_split: tensor_split,
    Tensor.tensor_split: tensor_split,
    scaled_mm_by_recipes: scaled_mm,
}
