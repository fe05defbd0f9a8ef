"""torch functions that Dynamo does not capture as they are called, written as Python functions that it looks into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fxshard._torch_compat import captured_instead, scaled_mm_by_recipes

aten = torch.ops.aten


def inlined() -> AbstractContextManager[None]:
    """While Dynamo captures a model: the functions of ``INLINED`` are looked into."""
    return captured_instead(INLINED)


def resize_(self: Tensor, *size: Any, memory_format: Any = None) -> Tensor:
    """In place: ``self`` has another shape afterwards."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    aten.resize_(self, shape, memory_format=memory_format)
    return self


def resize_as_(input: Tensor, the_template: Tensor, *, memory_format: Any = None) -> Tensor:
    if memory_format is None:
        aten.resize_(input, the_template.shape)
    else:
        aten.resize_as_(input, the_template, memory_format=memory_format)
    return input


def tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
    """Indices in a tensor become sizes that depend on data, one after the other."""
    if isinstance(indices_or_sections, Tensor):
        return aten.tensor_split(input, indices_or_sections.tolist(), dim)
    return aten.tensor_split(input, indices_or_sections, dim)


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
    """Recipes and swizzles are members of an enumeration, or the numbers that the operator takes."""
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
